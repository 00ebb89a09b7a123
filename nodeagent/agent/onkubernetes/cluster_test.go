// SPDX-License-Identifier: Apache-2.0

//go:build apitest

package onkubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"ambientd/cni-plugin/podevent"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/agent"
	"ambientd/nodeagent/workload"
	"ambientd/nodeagent/zds/zdstest"
	"ambientd/tools/apitest"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) {
	os.Exit(apitest.Reach(func() int { return netnstest.Main(m) }))
}

// patience bounds what a test awaits; nothing takes this long.
const patience = 30 * time.Second

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// cluster is the API server, with a namespace in the mesh and an agent on a node of the
// test's own.
type cluster struct {
	admin     *kubernetes.Clientset
	t         *testing.T
	namespace string
	node      string
	account   string // the agent's, as the audit log has it
	relay     *apitest.Relay
	cfg       agent.Config
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	netnstest.Require(t)
	_, byRelay := apitest.NewRelay(t, apitest.Kubeconfig(t))
	config, err := clientcmd.BuildConfigFromFlags("", byRelay)
	must(t, err)
	config.QPS = -1
	admin, err := kubernetes.NewForConfig(config)
	must(t, err)
	name := fmt.Sprintf("%s-%x", strings.ToLower(t.Name()), time.Now().UnixNano()&0xffffff)
	c := &cluster{admin: admin, t: t, namespace: name, node: "node-" + name}
	c.makeNamespace(c.namespace)
	c.makeNamespace("ambientd-system")
	c.makeAccount()
	dir, err := os.MkdirTemp("", "ambientd")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	c.cfg = agent.Default()
	c.cfg.NodeName, c.cfg.PodsFrom, c.cfg.Kubeconfig = c.node, "kubernetes", c.kubeconfig()
	c.cfg.RunDir, c.cfg.ZDSSocket = filepath.Join(dir, "run"), filepath.Join(dir, "zds.sock")
	c.cfg.Version = name
	return c
}

func (c *cluster) makeNamespace(name string) {
	c.t.Helper()
	ctx := c.t.Context()
	_, err := c.admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return
	}
	must(c.t, err)
	_, err = c.admin.CoreV1().ServiceAccounts(name).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
	must(c.t, err)
}

// makeAccount makes the agent's account and gives it the role of deploy/, and nothing
// else.
func (c *cluster) makeAccount() {
	c.t.Helper()
	content, err := os.ReadFile("../../../deploy/manifests/10-rbac.yaml")
	must(c.t, err)
	ctx, rbac := c.t.Context(), c.admin.RbacV1()
	for document := range strings.SplitSeq(string(content), "\n---\n") {
		var kind metav1.TypeMeta
		must(c.t, yaml.Unmarshal([]byte(document), &kind))
		switch kind.Kind {
		case "ServiceAccount":
			var account corev1.ServiceAccount
			must(c.t, yaml.UnmarshalStrict([]byte(document), &account))
			c.account = "system:serviceaccount:" + account.Namespace + ":" + account.Name
			_, err = c.admin.CoreV1().ServiceAccounts(account.Namespace).Create(ctx, &account, metav1.CreateOptions{})
		case "ClusterRole":
			var role rbacv1.ClusterRole
			must(c.t, yaml.UnmarshalStrict([]byte(document), &role))
			if _, err = rbac.ClusterRoles().Create(ctx, &role, metav1.CreateOptions{}); apierrors.IsAlreadyExists(err) {
				_, err = rbac.ClusterRoles().Update(ctx, &role, metav1.UpdateOptions{})
			}
		case "ClusterRoleBinding":
			var binding rbacv1.ClusterRoleBinding
			must(c.t, yaml.UnmarshalStrict([]byte(document), &binding))
			_, err = rbac.ClusterRoleBindings().Create(ctx, &binding, metav1.CreateOptions{})
		}
		if err != nil && !apierrors.IsAlreadyExists(err) {
			c.t.Fatal(err)
		}
	}
}

// kubeconfig is the agent's own, with a token bound to its pod on the node, by a relay.
func (c *cluster) kubeconfig() string {
	c.t.Helper()
	parts := strings.Split(c.account, ":")
	namespace, account := parts[2], parts[3]
	own := c.create(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "ambientd-" + c.namespace},
		Spec:       corev1.PodSpec{ServiceAccountName: account, HostNetwork: true},
	})
	token, err := c.admin.CoreV1().ServiceAccounts(namespace).CreateToken(c.t.Context(), account, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: own.Name, UID: own.UID}},
	}, metav1.CreateOptions{})
	must(c.t, err)
	relay, byRelay := apitest.NewRelay(c.t, apitest.KubeconfigOf(c.t, token.Status.Token))
	c.relay = relay
	return byRelay
}

// create is the scheduler: the pod is on the node.
func (c *cluster) create(pod *corev1.Pod) *corev1.Pod {
	c.t.Helper()
	pod.Spec.NodeName = c.node
	pod.Spec.Containers = []corev1.Container{{Name: "app", Image: "app"}}
	made, err := c.admin.CoreV1().Pods(pod.Namespace).Create(c.t.Context(), pod, metav1.CreateOptions{})
	must(c.t, err)
	c.t.Cleanup(func() {
		err := c.admin.CoreV1().Pods(pod.Namespace).Delete(context.Background(), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
		if err != nil && !apierrors.IsNotFound(err) {
			c.t.Error(err)
		}
	})
	return made
}

func (c *cluster) label(mode string) {
	c.t.Helper()
	patch := fmt.Sprintf(`{"metadata": {"labels": {"istio.io/dataplane-mode": %q}}}`, mode)
	_, err := c.admin.CoreV1().Namespaces().Patch(c.t.Context(), c.namespace, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	must(c.t, err)
}

// sandbox is a pod with what the runtime has made for it.
type sandbox struct {
	*corev1.Pod
	ns   *netnstest.NS
	path string
	ip   netip.Addr
}

func (c *cluster) pod(name string, number int) *sandbox {
	c.t.Helper()
	s := &sandbox{ns: netnstest.New(c.t), ip: netip.AddrFrom4([4]byte{10, 9, byte(number), 2})}
	gateway := netip.AddrFrom4([4]byte{10, 9, byte(number), 1})
	netnstest.Connect(c.t,
		netnstest.Port{NS: netnstest.Self(c.t), Name: fmt.Sprint("veth", number), Addrs: []netip.Prefix{netip.PrefixFrom(gateway, 24)}},
		netnstest.Port{NS: s.ns, Name: "eth0", Addrs: []netip.Prefix{netip.PrefixFrom(s.ip, 24)}, Gateways: []netip.Addr{gateway}})
	must(c.t, os.MkdirAll("/run/netns", 0o755))
	s.path = filepath.Join("/run/netns", fmt.Sprint("cni-", c.namespace, number))
	must(c.t, os.WriteFile(s.path, nil, 0o600))
	must(c.t, unix.Mount(fmt.Sprintf("/proc/self/fd/%d", s.ns.File().Fd()), s.path, "", unix.MS_BIND, ""))
	c.t.Cleanup(func() { must(c.t, unix.Unmount(s.path, unix.MNT_DETACH)) })
	s.Pod = c.create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: name}})
	return s
}

// phase is the kubelet: it writes how the pod stands.
func (c *cluster) phase(s *sandbox, phase corev1.PodPhase) {
	c.t.Helper()
	patch := fmt.Sprintf(`{"status": {"phase": %q, "podIP": %q, "podIPs": [{"ip": %q}]}}`, phase, s.ip, s.ip)
	_, err := c.admin.CoreV1().Pods(s.Namespace).Patch(c.t.Context(), s.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
	must(c.t, err)
}

// call is the runtime's with the plugin.
func (c *cluster) call(command string, s *sandbox) podevent.Reply {
	c.t.Helper()
	req := podevent.Request{
		Command: command, Network: "net", ContainerID: "sandbox-of-" + string(s.UID), IfName: "eth0", NetnsPath: s.path,
		Pod: podevent.Pod{Namespace: s.Namespace, Name: s.Name, UID: string(s.UID)},
	}
	if command == podevent.CommandAdd {
		req.IPs = []netip.Addr{s.ip}
	}
	reply, err := podevent.Call(c.t.Context(), c.cfg.CNISocketPath(), req, s.ns.File())
	must(c.t, err)
	return reply
}

// start runs an agent until the returned function or the test ends.
func (c *cluster) start(ready string) (stop func()) {
	c.t.Helper()
	lines := make(lines, 10000)
	cfg := c.cfg
	cfg.Logger = slog.New(slog.NewJSONHandler(lines, nil))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- agent.Run(ctx, cfg) }()
	over := false
	stop = func() {
		if !over {
			over = true
			cancel()
			must(c.t, <-ended)
		}
	}
	c.t.Cleanup(stop)
	deadline := time.After(patience)
	for {
		select {
		case line := <-lines:
			if line["msg"] == ready {
				return stop
			}
		case err := <-ended:
			c.t.Fatalf("the agent ended: %v", err)
		case <-deadline:
			c.t.Fatalf("the agent does not say %q", ready)
		}
	}
}

// lines is a log in JSON.
type lines chan map[string]any

func (l lines) Write(line []byte) (int, error) {
	var fields map[string]any
	if err := json.Unmarshal(line, &fields); err != nil {
		return 0, err
	}
	l <- fields
	return len(line), nil
}

// proxy connects a node proxy.
func (c *cluster) proxy() *zdstest.Peer {
	c.t.Helper()
	peer, err := zdstest.Dial(c.t.Context(), c.cfg.ZDSSocket, zdstest.AckAll)
	must(c.t, err)
	c.t.Cleanup(func() { peer.Close() })
	must(c.t, peer.AwaitReady(c.t.Context()))
	return peer
}

// await polls until cond holds: several parties have their hand in it.
func (c *cluster) await(what string, cond func() bool) {
	c.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !cond(); <-tick.C {
		if time.Now().After(deadline) {
			status, err := admin.Fetch(c.t.Context(), c.cfg.AdminSocketPath())
			c.t.Fatalf("awaiting %s; status: %+v, %v", what, status, err)
		}
	}
}

// enrolled is the number of pods that are wholly in the mesh.
func (c *cluster) enrolled() int {
	c.t.Helper()
	status, err := admin.Fetch(c.t.Context(), c.cfg.AdminSocketPath())
	must(c.t, err)
	n := 0
	for _, pod := range status.Pods {
		if pod.State == admin.PodEnrolled {
			n++
		}
	}
	return n
}

// shown is what the pod's annotation says.
func (c *cluster) shown(s *sandbox) string {
	c.t.Helper()
	pod, err := c.admin.CoreV1().Pods(s.Namespace).Get(c.t.Context(), s.Name, metav1.GetOptions{})
	must(c.t, err)
	return pod.Annotations[workload.AnnotationRedirection]
}

// requests are the agent's that have been answered. Of one whose token is not known the
// audit log has no user.
func (c *cluster) requests(keep func(apitest.Request) bool) []apitest.Request {
	return apitest.Requests(c.t, func(r apitest.Request) bool {
		return r.UserAgent == "ambientd/"+c.cfg.Version && (r.User.Username == c.account || r.User.Username == "") && keep(r)
	})
}
