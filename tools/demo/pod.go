// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"ambientd/nodeagent/admin"
	"ambientd/tools/enclave"
)

// pod is a pod of the demo, as Kubernetes and as the runtime see it.
type pod struct {
	namespace, name, serviceAccount string
	uid                             string
	labels                          map[string]string

	// Of the sandbox; set by the runtime.
	containerID string
	netns       *enclave.Netns
	ips         []netip.Addr

	// added is when ADD had returned, statusWhenAdded what the agent said then.
	added           time.Time
	statusWhenAdded admin.Status

	server *enclave.Process
	word   string // the server's, by which its answers are known in captured packets
}

func newPod(namespace, name, serviceAccount string, labels map[string]string) *pod {
	return &pod{namespace: namespace, name: name, serviceAccount: serviceAccount, labels: labels, uid: newUID()}
}

// String returns the pod as "namespace/name".
func (p *pod) String() string { return p.namespace + "/" + p.name }

// identity returns the SPIFFE ID of the pod's service account, whether it has one or not.
func (p *pod) identity() string {
	return fmt.Sprintf("spiffe://%s/ns/%s/sa/%s", trustDomain, p.namespace, p.serviceAccount)
}

// endpoint returns the address of the pod's server.
func (p *pod) endpoint(ip netip.Addr) string {
	return net.JoinHostPort(ip.String(), strconv.Itoa(serverPort))
}

// newUID returns a random UUID (RFC 9562, version 4).
func newUID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// newWord returns a text that occurs nowhere else.
func newWord(prefix string) string { return prefix + "-" + rand.Text() }

// writeManifest writes the pod's manifest to dir.
func (p *pod) writeManifest(dir string) error {
	return writeManifest(dir, "pod-"+p.namespace+"-"+p.name, &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: p.name, UID: types.UID(p.uid), Labels: p.labels},
		Spec: corev1.PodSpec{
			ServiceAccountName: p.serviceAccount,
			Containers:         []corev1.Container{{Name: "app", Image: "demo"}},
		},
	})
}

// removeManifest takes the pod's manifest away.
func (p *pod) removeManifest(dir string) error {
	err := os.Remove(manifestPath(dir, "pod-"+p.namespace+"-"+p.name))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("removing a manifest: %w", err)
	}
	return nil
}

func namespaceManifest(name string, labels map[string]string) *corev1.Namespace {
	return &corev1.Namespace{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
	}
}

func manifestPath(dir, name string) string { return filepath.Join(dir, name+".yaml") }

// writeManifest writes an object so that whoever reads the directory finds it whole.
func writeManifest(dir, name string, object any) error {
	text, err := yaml.Marshal(object)
	if err != nil {
		return fmt.Errorf("encoding manifest %s: %w", name, err)
	}
	path := manifestPath(dir, name)
	if err := os.WriteFile(path+".new", text, 0o644); err != nil {
		return fmt.Errorf("writing a manifest: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("writing a manifest: %w", err)
	}
	return nil
}

// startServer starts the pod's server and waits until it listens. A server that is
// there stays.
func (p *pod) startServer(ctx context.Context, starter *enclave.Starter) error {
	if p.server != nil {
		return nil
	}
	p.word = newWord("answer")
	server, err := p.start(starter, "server", "--word="+p.word)
	if err != nil {
		return err
	}
	p.server = server
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if _, err := p.server.Log().Await(ctx, 0, withMessage("listening")); err != nil {
		return fmt.Errorf("waiting for the server of pod %s: %w; it said:\n%s", p, err, p.server.Log().Tail(5))
	}
	return nil
}

// stopServer ends the pod's server, if it has one.
func (p *pod) stopServer() error {
	if p.server == nil {
		return nil
	}
	err := p.server.Stop()
	p.server = nil
	return err
}

// start starts a program in the pod's network namespace.
func (p *pod) start(starter *enclave.Starter, program string, args ...string) (*enclave.Process, error) {
	return starter.Start(enclave.Command{
		Name: fmt.Sprintf("the %s in pod %s", program, p), Path: "/proc/self/exe",
		Args: append([]string{podCommand, program}, args...), Netns: p.netns,
	})
}

// withMessage matches log lines by their field "msg".
func withMessage(msg string) func(enclave.Line) bool {
	return func(l enclave.Line) bool { return l.Field("msg") == msg }
}
