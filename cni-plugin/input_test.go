// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"ambientd/cni-plugin/podevent"
	"ambientd/tools/netnstest"
)

func TestNeedPod(t *testing.T) {
	pod := podevent.Pod{Namespace: "shop", Name: "cart-0", UID: "u1"}
	for _, c := range []struct {
		name, args string
		want       podevent.Pod
		err        string
	}{
		{"as containerd", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart-0;K8S_POD_INFRA_CONTAINER_ID=c;K8S_POD_UID=u1", pod, ""},
		{"in another order", "K8S_POD_UID=u1;K8S_POD_NAME=cart-0;K8S_POD_NAMESPACE=shop", pod, ""},
		{"unknown ones, not announced", "X=y;K8S_POD_UID=u1;K8S_POD_NAME=cart-0;K8S_POD_NAMESPACE=shop;IgnoreUnknown=0", pod, ""},
		{"the same twice", "K8S_POD_UID=u1;K8S_POD_NAME=cart-0;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart-0", pod, ""},
		{"no UID", "K8S_POD_NAME=cart-0;K8S_POD_NAMESPACE=shop", podevent.Pod{Namespace: "shop", Name: "cart-0"}, ""},
		{"nothing", "", podevent.Pod{}, "K8S_POD_NAMESPACE and K8S_POD_NAME missing"},
		{"no name", "K8S_POD_NAMESPACE=shop", podevent.Pod{Namespace: "shop"}, "K8S_POD_NAME missing"},
		{"other case", "k8s_pod_name=cart-0;K8S_POD_NAMESPACE=shop", podevent.Pod{Namespace: "shop"}, "K8S_POD_NAME missing"},
		{"two UIDs", "K8S_POD_UID=u1;K8S_POD_UID=u2;K8S_POD_NAME=cart-0;K8S_POD_NAMESPACE=shop",
			podevent.Pod{Namespace: "shop", Name: "cart-0", UID: "u2"}, `K8S_POD_UID is given twice, as "u1" and "u2"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := needPod(c.args)
			checkError(t, err, c.err)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// checkError expects an error with a text, or none for "".
func checkError(t *testing.T, err error, want string) {
	t.Helper()
	if want == "" && err != nil {
		t.Errorf("error: %v", err)
	}
	if want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
		t.Errorf("error: %v, want one with %q", err, want)
	}
}

func TestParseAddresses(t *testing.T) {
	for _, c := range []struct {
		name, result, want, err string
	}{
		{"dual stack", `{"interfaces":[{"name":"cni0"},{"name":"eth0","sandbox":"/x"}],
			"ips":[{"address":"10.0.0.2/24","interface":1},{"address":"fd00::2/64","interface":1}]}`, "[10.0.0.2 fd00::2]", ""},
		{"the host's side is not the pod's", `{"interfaces":[{"name":"veth1"},{"name":"eth0","sandbox":"/x"}],
			"ips":[{"address":"10.0.0.2/24","interface":1},{"address":"10.0.0.1/24","interface":0}]}`, "[10.0.0.2]", ""},
		{"without interface", `{"interfaces":[{"name":"cali1"}],"ips":[{"address":"10.0.0.2/32"}]}`, "[10.0.0.2]", ""},
		{"no sandbox anywhere", `{"interfaces":[{"name":"eth0"}],"ips":[{"address":"10.0.0.2/32","interface":0}]}`, "[10.0.0.2]", ""},
		{"two interfaces", `{"interfaces":[{"name":"eth0","sandbox":"/x"},{"name":"net1","sandbox":"/x"}],
			"ips":[{"address":"10.1.0.2/24","interface":1},{"address":"10.0.0.2/24","interface":0}]}`, "[10.1.0.2 10.0.0.2]", ""},
		{"twice the same", `{"ips":[{"address":"10.0.0.2/24"},{"address":"::ffff:10.0.0.2/120"}]}`, "[10.0.0.2]", ""},
		{"none", `{}`, "[]", ""},
		{"null list", `{"ips":null}`, "[]", ""},
		{"nothing", ``, "[]", "there is none"},
		{"null", `null`, "[]", "there is none"},
		{"a number", `7`, "[]", "cannot unmarshal number"},
		{"0.2.0", `{"cniVersion":"0.2.0","ip4":{"ip":"10.0.0.2/24"}}`, "[]", "cannot be chained"},
		{"no prefix length", `{"ips":[{"address":"10.0.0.2"}]}`, "[]", "ips[0].address"},
		{"with a zone", `{"ips":[{"address":"fe80::1%eth0/64"}]}`, "[]", "ips[0].address"},
		{"negative interface", `{"interfaces":[{}],"ips":[{"address":"10.0.0.2/24","interface":-1}]}`, "[]", "ips[0].interface is -1, there are 1"},
		{"interface out of range", `{"interfaces":[{}],"ips":[{"address":"10.0.0.2/24","interface":1}]}`, "[]", "ips[0].interface is 1, there are 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := parseAddresses(json.RawMessage(c.result))
			checkError(t, err, c.err)
			if fmt.Sprint(got) != c.want {
				t.Errorf("got %v, want %s", got, c.want)
			}
		})
	}
}

func TestParseAttachments(t *testing.T) {
	for _, c := range []struct {
		raw, err string
		want     []podevent.Attachment
	}{
		{raw: `null`, want: []podevent.Attachment{}},
		{raw: `[]`, want: []podevent.Attachment{}},
		{raw: `[{"containerID":"c","ifname":"i"}]`, want: []podevent.Attachment{{ContainerID: "c", IfName: "i"}}},
		{raw: ``, err: "there is none"},
		{raw: `{}`, err: "cannot unmarshal object"},
		{raw: `[{"containerID":"c"}]`, err: "item 0 has no containerID or no ifname"},
		{raw: `[null]`, err: "item 0"},
	} {
		var raw json.RawMessage
		if c.raw != "" {
			raw = json.RawMessage(c.raw)
		}
		got, err := parseAttachments(raw)
		checkError(t, err, c.err)
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: %s", c.raw, diff)
		}
	}
}

// TestOpenNetns: of everything that can be at a path, only another network namespace is opened.
func TestOpenNetns(t *testing.T) {
	pod, self := netnstest.New(t), netnstest.Self(t)
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	mounted := filepath.Join(dir, "mounted")
	if err := os.WriteFile(mounted, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount(nsPath(pod), mounted, "", syscall.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(mounted, 0); err != nil {
			t.Error(err)
		}
	})
	for _, c := range []struct{ name, path, err string }{
		{"a pod's", nsPath(pod), ""},
		{"a pod's, mounted as runtimes do", mounted, ""},
		{"our own", nsPath(self), "own network namespace"},
		{"our own by another path", "/proc/thread-self/ns/net", "own network namespace"},
		{"a mount namespace", "/proc/self/ns/mnt", "another type (0x20000)"},
		{"a user namespace", "/proc/self/ns/user", "another type (0x10000000)"},
		{"a FIFO", fifo, "is no namespace"},
		{"a directory", dir, "is no namespace"},
		{"a device", os.DevNull, "is no namespace"},
		{"something of /proc", "/proc/self/status", "is no namespace"},
		{"nothing", filepath.Join(dir, "none"), "no such file"},
	} {
		t.Run(c.name, func(t *testing.T) {
			file, err := openNetns(c.path)
			checkError(t, err, c.err)
			if file == nil {
				return
			}
			if got, want := fileID(file), fileID(pod.File()); got != want {
				t.Errorf("opened %s, want %s", got, want)
			}
			if err := file.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}
