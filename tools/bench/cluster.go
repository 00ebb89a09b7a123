// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"ambientd/cni-plugin/podevent"
	"ambientd/tools/apitest"
)

const (
	// benchNode is the agent's node; pods of all others are none of its business.
	benchNode = "bench"
	// clients is how many requests the bench makes of the API server at the same time.
	clients = 16
	// apiTimeout bounds what the bench waits for at the API server.
	apiTimeout = time.Minute
)

// cluster is a real API server. The bench and the agent reach it each by a relay of its own.
type cluster struct {
	*kubernetes.Clientset
	relays     []*apitest.Relay
	agents     *apitest.Relay // the agent's
	kubeconfig string         // the agent's
	user       string         // the agent, as the audit log calls it
	audit      string         // path of the log
	name       string         // what names of namespaces begin with
}

// openCluster reaches the API server of $KUBECONFIG, and makes an account for the agent.
// What an account with fewer rights may do is tested elsewhere.
func openCluster(ctx context.Context, dir string) (_ *cluster, err error) {
	c := &cluster{audit: os.Getenv("DEVCLUSTER_AUDIT_LOG"), name: fmt.Sprintf("bench-%x", time.Now().UnixNano()&0xffffff)}
	admin := os.Getenv("KUBECONFIG")
	if admin == "" || c.audit == "" {
		return nil, errors.New("KUBECONFIG or DEVCLUSTER_AUDIT_LOG is not set: this is for `devcluster run`, as in `make bench-api`")
	}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	_, byRelay, err := c.relay(admin, filepath.Join(dir, "admin"), "") //nolint:contextcheck // a relay lives until it is closed
	if err != nil {
		return nil, err
	}
	config, err := clientcmd.BuildConfigFromFlags("", byRelay)
	if err != nil {
		return nil, fmt.Errorf("reading the administrator's kubeconfig: %w", err)
	}
	config.QPS = -1
	config.ContentType = runtime.ContentTypeProtobuf
	if c.Clientset, err = kubernetes.NewForConfig(config); err != nil {
		return nil, fmt.Errorf("making a client: %w", err)
	}
	token, err := c.makeAccount(ctx)
	if err != nil {
		return nil, err
	}
	c.agents, c.kubeconfig, err = c.relay(admin, filepath.Join(dir, "agent"), token) //nolint:contextcheck // a relay lives until it is closed
	return c, err
}

func (c *cluster) relay(kubeconfig, dir, token string) (*apitest.Relay, string, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, "", fmt.Errorf("making a directory for a kubeconfig: %w", err)
	}
	relay, byRelay, err := apitest.OpenRelay(kubeconfig, dir, token)
	if err == nil {
		c.relays = append(c.relays, relay)
	}
	return relay, byRelay, err
}

// close ends all connections. Objects end with the cluster.
func (c *cluster) close() {
	for _, relay := range c.relays {
		relay.Close()
	}
}

// makeAccount makes the agent's account and returns its token.
func (c *cluster) makeAccount(ctx context.Context) (token string, err error) {
	namespace, err := c.makeNamespace(ctx, "system", outside)
	if err != nil {
		return "", err
	}
	const account = "ambientd"
	if _, err := c.CoreV1().ServiceAccounts(namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{}); err != nil {
		return "", fmt.Errorf("making the agent's account: %w", err)
	}
	_, err = c.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: namespace},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: account}},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("giving the agent's account its rights: %w", err)
	}
	request, err := c.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, account, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("asking for the agent's token: %w", err)
	}
	c.user = "system:serviceaccount:" + namespace + ":" + account
	return request.Status.Token, nil
}

// makeNamespace makes a namespace, and in it the account that pods have.
func (c *cluster) makeNamespace(ctx context.Context, name string, m membership) (string, error) {
	object := namespaceManifest(c.name+"-"+name, m)
	if _, err := c.CoreV1().Namespaces().Create(ctx, object, metav1.CreateOptions{}); err != nil {
		return "", fmt.Errorf("making namespace %s: %w", object.Name, err)
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: podAccount}}
	if _, err := c.CoreV1().ServiceAccounts(object.Name).Create(ctx, account, metav1.CreateOptions{}); err != nil {
		return "", fmt.Errorf("making an account in namespace %s: %w", object.Name, err)
	}
	return object.Name, nil
}

// makeNamespaces makes n namespaces.
func (c *cluster) makeNamespaces(ctx context.Context, name string, n int, m membership) ([]string, error) {
	made := make([]string, n)
	return made, each(ctx, n, func(ctx context.Context, i int) (err error) {
		made[i], err = c.makeNamespace(ctx, fmt.Sprintf("%s-%d", name, i), m)
		return err
	})
}

// each calls fn with the numbers to n, some at the same time.
func each(ctx context.Context, n int, fn func(context.Context, int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(clients)
	for i := range n {
		if ctx.Err() != nil {
			break
		}
		group.Go(func() error { return fn(ctx, i) })
	}
	return group.Wait()
}

// apiPod is a pod at the API server.
type apiPod struct {
	podevent.Pod
	ips []netip.Addr
}

// makePods makes n pods on a node, in the namespaces in turn.
func (c *cluster) makePods(ctx context.Context, node string, namespaces []string, n int) ([]apiPod, error) {
	made := make([]apiPod, n)
	return made, each(ctx, n, func(ctx context.Context, i int) (err error) {
		made[i], err = c.makePod(ctx, node, namespaces[i%len(namespaces)], i)
		return err
	})
}

func (c *cluster) makePod(ctx context.Context, node, namespace string, number int) (apiPod, error) {
	object := apiPodObject(namespace, fmt.Sprintf("%s-%d", node, number), node)
	created, err := c.CoreV1().Pods(object.Namespace).Create(ctx, object, metav1.CreateOptions{})
	if err != nil {
		return apiPod{}, fmt.Errorf("making pod %s/%s: %w", object.Namespace, object.Name, err)
	}
	return apiPod{
		Pod: podevent.Pod{Namespace: created.Namespace, Name: created.Name, UID: string(created.UID)}, ips: podAddresses(number + 1),
	}, nil
}

// reportAll is report of all pods.
func (c *cluster) reportAll(ctx context.Context, pods []apiPod, restarts int) error {
	return each(ctx, len(pods), func(ctx context.Context, i int) error { return c.report(ctx, pods[i], restarts) })
}

// report is what kubelet tells of a pod: that it runs, and how often it was started again.
func (c *cluster) report(ctx context.Context, pod apiPod, restarts int) error {
	patch := fmt.Appendf(nil, `{"status": {"phase": "Running", "hostIP": "192.0.2.1", "podIP": %[1]q, "podIPs": [{"ip": %[1]q}, {"ip": %[2]q}],
		"conditions": [{"type": "Ready", "status": "True"}, {"type": "ContainersReady", "status": "True"}, {"type": "Initialized", "status": "True"}],
		"containerStatuses": [{"name": "app", "image": "registry.example/shop/app:v1", "imageID": "registry.example/shop/app@sha256:0123456789abcdef",
		"containerID": "containerd://771dc945d8ef33320eb739394c08f1c5818a4cd1741bc7a6d63e98e9d6ca1538", "ready": true, "started": true,
		"restartCount": %[3]d, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}]}}`, pod.ips[0], pod.ips[1], restarts)
	_, err := c.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	if err != nil {
		return fmt.Errorf("reporting pod %s: %w", pod.Pod, err)
	}
	return nil
}

// requests are the agent's that came since then and that the API server has answered.
func (c *cluster) requests(since time.Time) ([]apitest.Request, error) {
	return apitest.ReadRequests(c.audit, func(r apitest.Request) bool {
		return r.User.Username == c.user && !r.RequestReceivedTimestamp.Before(since)
	})
}
