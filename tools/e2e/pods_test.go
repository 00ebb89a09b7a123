// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

const (
	modeLabel  = "istio.io/dataplane-mode"
	appImage   = "localhost/testapp:dev"
	appPort    = 8080
	roleLabel  = "e2e.ambientd.io/role"
	roleServer = "server"
	roleClient = "client" // pods whose log is followed
)

// every is how often a client asks.
const every = 300 * time.Millisecond

// app is a pod of a test.
type app struct {
	namespace, name, account, node string
	role                           string
	args                           []string
	change                         func(*corev1.Pod)
}

// server answers HTTP, and has probes for which kubelet asks it.
func server(namespace, name, node string) app {
	return app{namespace: namespace, name: name, account: "server", node: node, role: roleServer, args: []string{"serve"},
		change: func(pod *corev1.Pod) {
			container := &pod.Spec.Containers[0]
			container.ReadinessProbe = probe(corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/", Port: intstr.FromInt32(appPort)}})
			container.LivenessProbe = probe(corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(appPort)}})
		}}
}

func probe(handler corev1.ProbeHandler) *corev1.Probe {
	return &corev1.Probe{ProbeHandler: handler, PeriodSeconds: 1, TimeoutSeconds: 2, FailureThreshold: 3}
}

// client asks the server for ever, each time on a new connection.
func client(namespace, name, node, address string) app {
	return app{namespace: namespace, name: name, account: "client", node: node, role: roleClient,
		args: []string{"get", "--attempts=0", "--every=" + every.String(), fmt.Sprintf("http://%s:%d/", address, appPort)}}
}

// object is the pod as the API server gets it.
func (a app) object() *corev1.Pod {
	grace, no := int64(5), false
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: a.namespace, Name: a.name, Labels: map[string]string{roleLabel: a.role}},
		Spec: corev1.PodSpec{
			ServiceAccountName:            a.account,
			AutomountServiceAccountToken:  &no,
			EnableServiceLinks:            &no,
			TerminationGracePeriodSeconds: &grace,
			Containers: []corev1.Container{{
				Name: "app", Image: appImage, ImagePullPolicy: corev1.PullNever, Args: a.args,
				TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
			}},
		},
	}
	if a.node != "" {
		pod.Spec.NodeSelector = map[string]string{corev1.LabelHostname: a.node}
	}
	if a.change != nil {
		a.change(pod)
	}
	return pod
}

func (c *cluster) create(t *testing.T, apps ...app) {
	t.Helper()
	for _, a := range apps {
		_, err := c.client.CoreV1().Pods(a.namespace).Create(t.Context(), a.object(), metav1.CreateOptions{})
		must(t, err)
	}
}

// start makes pods and waits until all are ready. It returns them.
func (c *cluster) start(t *testing.T, apps ...app) []*corev1.Pod {
	t.Helper()
	c.create(t, apps...)
	pods := make([]*corev1.Pod, len(apps))
	c.until(t, fmt.Sprintf("%d pods of %s ready", len(apps), apps[0].namespace), func() (err error) {
		for i, a := range apps {
			if pods[i], err = c.pod(a.namespace, a.name); err != nil {
				return err
			}
			if err := ready(pods[i]); err != nil {
				return err
			}
		}
		return nil
	})
	return pods
}

// ready says why the pod is not.
func ready(pod *corev1.Pod) error {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodReady {
			if condition.Status == corev1.ConditionTrue && pod.Status.PodIP != "" {
				return nil
			}
			return fmt.Errorf("pod %s/%s, %s, is not ready: %s", pod.Namespace, pod.Name, pod.Status.Phase, condition.Message)
		}
	}
	return fmt.Errorf("pod %s/%s is %s", pod.Namespace, pod.Name, pod.Status.Phase)
}

// attempt is a line that the test's client prints.
type attempt struct {
	Time   time.Time
	Answer *struct{ Pod, Peer, Host string }
	Err    string
}

// attempts returns what the client has come to since then.
func (c *cluster) attempts(namespace, name string, since time.Time) ([]attempt, error) {
	var found []attempt
	for _, raw := range c.logs.lines(namespace, name, "app") {
		var a attempt
		if err := json.Unmarshal([]byte(raw), &a); err != nil {
			return nil, fmt.Errorf("the client %s/%s says %q: %w", namespace, name, raw, err)
		}
		if a.Time.After(since) {
			found = append(found, a)
		}
	}
	return found, nil
}

// answered says why the client has had no answer from the server since then. No attempt
// is the one that was under way at that time.
func (c *cluster) answered(client, server *corev1.Pod, since time.Time) error {
	attempts, err := c.attempts(client.Namespace, client.Name, since.Add(every))
	if err != nil {
		return err
	}
	last := "no attempt"
	for _, a := range attempts {
		if a.Answer != nil && a.Answer.Pod == server.Name {
			return nil
		}
		last = fmt.Sprintf("%+v", a)
	}
	return fmt.Errorf("%s/%s has no answer of %s/%s: %d attempts, the last one: %s",
		client.Namespace, client.Name, server.Namespace, server.Name, len(attempts), last)
}
