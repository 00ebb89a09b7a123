// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	cniversion "github.com/containernetworking/cni/pkg/version"
	"github.com/google/go-cmp/cmp"

	"ambientd/cni-plugin/podevent"
	"ambientd/tools/netnstest"
)

// primaryName is the plugin that comes first in the tests' chains.
const primaryName = "test-primary"

// primary is a CNI plugin that does nothing but return a result, in the configuration's version.
func primary() {
	add := func(args *skel.CmdArgs) error {
		var conf types.NetConf
		if err := json.Unmarshal(args.StdinData, &conf); err != nil {
			return err
		}
		result := &types100.Result{CNIVersion: types100.ImplementedSpecVersion}
		if err := json.Unmarshal([]byte(`{"cniVersion":"1.1.0","interfaces":[{"name":"veth1"},{"name":"eth0","sandbox":"/x"}],
			"ips":[{"address":"10.244.1.3/24","interface":1},{"address":"fd00::3/64","interface":1}]}`), result); err != nil {
			return err
		}
		return types.PrintResult(result, conf.CNIVersion)
	}
	nothing := func(*skel.CmdArgs) error { return nil }
	skel.PluginMainFuncs(skel.CNIFuncs{Add: add, Del: nothing, Check: nothing, GC: nothing, Status: nothing},
		cniversion.All, primaryName)
}

// runtime is libcni with the test's plugins, and a chain of the two.
type runtime struct {
	*libcni.CNIConfig
	list *libcni.NetworkConfigList
	rt   *libcni.RuntimeConf
}

func newRuntime(t *testing.T, version, socket string) runtime {
	t.Helper()
	path, err := exec.LookPath(pluginName)
	if err != nil {
		t.Fatal(err)
	}
	list, err := libcni.ConfListFromBytes(fmt.Appendf(nil, `{"cniVersion":%q,"name":"testnet","plugins":[
		{"type":%q},{"type":%q,"socket":%q,"strictStatus":true,"timeout":"10s"}]}`, version, primaryName, pluginName, socket))
	if err != nil {
		t.Fatal(err)
	}
	return runtime{
		CNIConfig: libcni.NewCNIConfigWithCacheDir([]string{filepath.Dir(path)}, t.TempDir(), nil),
		list:      list,
		rt: &libcni.RuntimeConf{
			ContainerID: "c1", NetNS: nsPath(netnstest.New(t)), IfName: "eth0",
			Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAME", "cart-0"}, {"K8S_POD_NAMESPACE", "shop"}, {"K8S_POD_UID", "u1"}},
		},
	}
}

// TestLifeOfAPod runs the whole of it through libcni, in every version.
func TestLifeOfAPod(t *testing.T) {
	for _, version := range supportedVersions() {
		t.Run(version, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "cni.sock")
			agent := startAgent(t, socket, answers(podevent.Reply{Result: podevent.ResultEnrolled}))
			r := newRuntime(t, version, socket)
			ctx := t.Context()

			if _, err := r.ValidateNetworkList(ctx, r.list); err != nil {
				t.Errorf("VERSION: %v", err)
			}
			result, err := r.AddNetworkList(ctx, r.list, r.rt)
			if err != nil {
				t.Fatalf("ADD: %v", err)
			}
			checkResult(t, result, version)
			if err := r.CheckNetworkList(ctx, r.list, r.rt); err != nil && version != "0.3.1" {
				t.Errorf("CHECK: %v", err)
			}
			for range 2 {
				if err := r.DelNetworkList(ctx, r.list, r.rt); err != nil {
					t.Errorf("DEL: %v", err)
				}
				r.rt.NetNS = "" // as after the sandbox is gone
			}
			if err := r.GCNetworkList(ctx, r.list, &libcni.GCArgs{}); err != nil {
				t.Errorf("GC: %v", err)
			}
			if err := r.GetStatusNetworkList(ctx, r.list); err != nil {
				t.Errorf("STATUS: %v", err)
			}
			want := []string{"ADD", "CHECK", "DEL", "DEL"}
			switch version {
			case "0.3.1":
				want = []string{"ADD", "DEL", "DEL"}
			case "1.1.0":
				want = append(want, "GC", "STATUS")
			}
			var got []string
			for _, req := range agent.take() {
				got = append(got, req.Command)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// checkResult expects the primary plugin's result, in the version of the configuration.
func checkResult(t *testing.T, result types.Result, version string) {
	t.Helper()
	if result.Version() != version {
		t.Errorf("the result has version %s", result.Version())
	}
	full, err := types100.NewResultFromResult(result)
	if err != nil {
		t.Fatal(err)
	}
	var ips []string
	for _, ip := range full.IPs {
		ips = append(ips, ip.Address.String())
	}
	if diff := cmp.Diff([]string{"10.244.1.3/24", "fd00::3/64"}, ips); diff != "" {
		t.Error(diff)
	}
}

// TestRuntimeSeesCodes: the agent's errors reach the runtime with their codes, which it acts upon.
func TestRuntimeSeesCodes(t *testing.T) {
	for _, code := range []uint{
		podevent.CodeInvalidNetns, podevent.CodeTryAgain, podevent.CodeRedirection, podevent.CodeIdentityDenied,
	} {
		socket := filepath.Join(t.TempDir(), "cni.sock")
		startAgent(t, socket, answers(podevent.Reply{Error: &podevent.Error{Code: code, Msg: "m", Details: "d"}}))
		r := newRuntime(t, "1.1.0", socket)
		_, err := r.AddNetworkList(t.Context(), r.list, r.rt)
		var cniErr *types.Error
		if !errors.As(err, &cniErr) || *cniErr != (types.Error{Code: code, Msg: "m", Details: "d"}) {
			t.Errorf("ADD: %#v, want code %d", err, code)
		}
		if err := r.CheckNetworkList(t.Context(), r.list, r.rt); !errors.As(err, &cniErr) || cniErr.Code != code {
			t.Errorf("CHECK: %v, want code %d", err, code)
		}
	}
}

// environment is the last value of a variable of cmd's.
func environment(cmd *exec.Cmd, name string) (value string) {
	for _, v := range cmd.Env {
		if after, ok := strings.CutPrefix(v, name+"="); ok {
			value = after
		}
	}
	return value
}

// TestSamples sends what containerd was seen to send, as it came but for the socket.
func TestSamples(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "cni.sock")
	agent := startAgent(t, socket, answers(podevent.Reply{Result: podevent.ResultSkipped}))
	pod := podevent.Pod{Namespace: "shop", Name: "cart-0", UID: "u1"}
	for name, sample := range samples(t) {
		t.Run(name, func(t *testing.T) {
			verb, _, _ := strings.Cut(name, "-")
			stdin := withKeys(t, sample, map[string]any{"socket": socket, "strictStatus": true})
			cmd := newCall(t, verb, stdin)
			if verb == podevent.CommandStatus {
				cmd.Env = append(cmd.Env, "CNI_ARGS=", "CNI_NETNS=", "CNI_CONTAINERID=", "CNI_IFNAME=")
			}
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			got := agent.take()
			if len(got) != 1 {
				t.Fatalf("the agent was asked %d times", len(got))
			}
			want := podevent.Request{Version: podevent.Version, Command: verb, Network: "testnet"}
			if verb != podevent.CommandStatus {
				want.ContainerID, want.IfName, want.Pod = "c1", "eth0", pod
			}
			if verb == podevent.CommandAdd {
				want.NetnsPath = environment(cmd, "CNI_NETNS")
				var conf struct{ PrevResult json.RawMessage }
				if err := json.Unmarshal(stdin, &conf); err != nil {
					t.Fatal(err)
				}
				if want.IPs, err = parseAddresses(conf.PrevResult); err != nil || len(want.IPs) != 1 {
					t.Fatalf("addresses %v, %v", want.IPs, err)
				}
				if !bytes.Equal(out, conf.PrevResult) {
					t.Errorf("printed %s\nwant %s", out, conf.PrevResult)
				}
			} else if len(out) > 0 {
				t.Errorf("printed %s", out)
			}
			if diff := cmp.Diff(want, got[0].Request, cmp.Comparer(sameText)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func sameText(a, b fmt.Stringer) bool { return a.String() == b.String() }

// newCall is the plugin, called for a pod of its own.
func newCall(t *testing.T, verb string, stdin []byte) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(pluginName)
	cmd.Stdin = bytes.NewReader(stdin)
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+verb, "CNI_CONTAINERID=c1", "CNI_IFNAME=eth0", "CNI_PATH=/opt/cni/bin",
		"CNI_NETNS="+nsPath(netnstest.New(t)), "CNI_ARGS=K8S_POD_UID=u1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart-0")
	return cmd
}

// TestDeadlines: with an agent that does not answer, each command ends when it should. Upper bounds
// leave a busy machine some room, and are below the next longer deadline.
func TestDeadlines(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "cni.sock")
	startAgent(t, socket, staysSilent)
	conf := fmt.Sprintf(`{"cniVersion":"1.1.0","name":"n","prevResult":{},"cni.dev/valid-attachments":[],"strictStatus":true,"socket":%q`, socket)
	for _, c := range []struct {
		name, verb, stdin, namespace string
		min, max                     time.Duration
		fails                        bool
	}{
		{"ADD", "ADD", conf + `,"timeout":"300ms"}`, "shop", 300 * time.Millisecond, 15 * time.Second, true},
		{"ADD of an excluded pod", "ADD", conf + `}`, "kube-system", outsideTimeout, 15 * time.Second, false},
		{"ADD of an excluded pod in a hurry", "ADD", conf + `,"timeout":"300ms"}`, "kube-system", 300 * time.Millisecond, outsideTimeout, false},
		{"CHECK", "CHECK", conf + `,"timeout":"300ms"}`, "shop", 300 * time.Millisecond, 15 * time.Second, true},
		{"GC", "GC", conf + `,"timeout":"300ms"}`, "shop", 300 * time.Millisecond, 15 * time.Second, true},
		{"DEL", "DEL", conf + `}`, "shop", delTimeout, 15 * time.Second, false},
		{"STATUS", "STATUS", conf + `}`, "shop", statusTimeout, 15 * time.Second, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cmd := newCall(t, c.verb, []byte(c.stdin))
			cmd.Env = append(cmd.Env, "CNI_ARGS=K8S_POD_NAME=p;K8S_POD_NAMESPACE="+c.namespace)
			start := time.Now()
			out, err := cmd.Output()
			took := time.Since(start)
			if (err != nil) != c.fails {
				t.Errorf("%v: %s", err, out)
			}
			if took < c.min || took > c.max {
				t.Errorf("took %s, want %s to %s", took, c.min, c.max)
			}
		})
	}
}

// TestDelWithoutAgent is case 1, the plugin's time: DEL is done in under a second while the agent is
// stopped, whether the event can be left for it or not.
func TestDelWithoutAgent(t *testing.T) {
	for _, spool := range []string{"", "/private"} {
		runDir := t.TempDir()
		if err := os.MkdirAll(runDir+spool, 0o700); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		out, err := newCall(t, "DEL", fmt.Appendf(nil, `{"cniVersion":"1.1.0","name":"n","runDir":%q}`, runDir)).CombinedOutput()
		if took := time.Since(start); err != nil || len(out) > 0 || took > time.Second {
			t.Errorf("DEL with %q in the run directory: %v, %q, after %s", spool, err, out, took)
		}
		events, err := filepath.Glob(runDir + "/private/spool/*.json")
		if err != nil || (len(events) == 1) != (spool != "") {
			t.Errorf("left: %q, %v", events, err)
		}
	}
}

// TestKilledPlugin: when the runtime kills the plugin, the agent sees the end of the connection,
// from which it knows that it has to undo.
func TestKilledPlugin(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "cni.sock")
	asked, ended := make(chan struct{}), make(chan error, 1)
	startAgent(t, socket, func(conn net.Conn) error {
		close(asked)
		_, err := conn.Read(make([]byte, 1))
		ended <- err
		return err
	})
	cmd := newCall(t, "ADD", fmt.Appendf(nil, `{"cniVersion":"1.1.0","name":"n","prevResult":{},"socket":%q}`, socket))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-asked
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, io.EOF) {
		t.Errorf("the agent reads %v", err)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) {
		t.Errorf("the plugin ended with %v", err)
	}
}

// TestClosedStdout: a result that cannot be printed is no success.
func TestClosedStdout(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "cni.sock")
	startAgent(t, socket, answers(podevent.Reply{Result: podevent.ResultEnrolled}))
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	cmd := newCall(t, "ADD", fmt.Appendf(nil, `{"cniVersion":"1.1.0","name":"n","prevResult":{},"socket":%q}`, socket))
	var stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = full, &stderr
	if err := cmd.Run(); err == nil {
		t.Error("success")
	}
	if !strings.Contains(stderr.String(), "printing the error") {
		t.Errorf("stderr: %s", stderr.String())
	}
}
