// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"flag"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"ambientd/iptables/iptables"
	"ambientd/nodeagent/agent"
	"ambientd/nodeagent/podnetns"
	"ambientd/tools/enclave"
	"ambientd/tools/netnstest"
)

// runAmbientd is the whole agent, with those of its flags that the bench uses: an ordinary
// user who was given this test's binary may have nothing to build the real one with.
func runAmbientd(args []string) error {
	cfg := agent.Default()
	flags := flag.NewFlagSet("run", flag.ContinueOnError)
	for name, value := range map[string]*string{
		"pods-from": &cfg.PodsFrom, "node-name": &cfg.NodeName, "redirection": &cfg.Redirection, "log-format": &cfg.LogFormat, "proc-root": &cfg.ProcRoot,
		"kubeconfig": &cfg.Kubeconfig,
	} {
		flags.StringVar(value, name, *value, "")
	}
	flags.DurationVar(&cfg.CertLinger, "cert-linger", cfg.CertLinger, "")
	if err := flags.Parse(args); err != nil {
		return err
	}
	cfg.Logger = slog.New(slog.NewJSONHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return agent.Run(ctx, cfg)
}

// TestRunningOnce runs one round of the running pods' part, limits aside, but for the one
// that does not depend on the machine: a restart on nftables starts no child process. That
// on iptables it does shows that the count is one.
func TestRunningOnce(t *testing.T) {
	requireRestore(t)
	bin := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(self, filepath.Join(bin, "ambientd")); err != nil {
		t.Fatal(err)
	}
	starter, err := enclave.NewStarter()
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{
		cfg: config{parts: partNames(), backends: backendNames(), rounds: 1, bin: bin, crowd: crowdSize{members: 4, bystanders: 2, perPod: 2, host: 3}},
		dir: t.TempDir(), progress: &bytes.Buffer{}, starter: starter,
	}
	backend, err := iptables.New(t.Context(), iptables.Config{Variant: iptables.NFTables})
	if err != nil {
		t.Fatal(err)
	}
	if b.yardstick, err = newYardstick(t.Context(), b.dir, backend); err != nil {
		t.Fatal(err)
	}
	if err := b.running(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.close(); err != nil {
		t.Fatal(err)
	}
	if r := find(t, b.rows, "nftables: child processes"); r.Value != 0 || !r.Pass {
		t.Errorf("a restart on nftables starts child processes: %+v", r)
	}
	// One that reads the rules of a family, for each pod.
	if r := find(t, b.rows, "iptables: child processes"); r.Value < 4*2 {
		t.Errorf("a restart with 4 pods on iptables counts %v child processes, want at least 8", r.Value)
	}
	allMeasured(t, b.rows)
	nothingLeft(t)
}

func TestHadChildren(t *testing.T) {
	for _, c := range []struct {
		name, script string
		want         bool
	}{
		{"none", "echo; read x", false},
		{"one that has ended", "/bin/true; echo; read x", true},
		{"one that runs", "sleep 60 & echo; read x; kill $!", true},
		{"a name that holds brackets", "/bin/true; printf 'a) b (c' >/proc/self/comm; echo; read x", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), "sh", "-c", c.script)
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			if got, err := hadChildren(cmd.Process.Pid); got != c.want || err != nil {
				t.Errorf("got %t (%v), want %t", got, err, c.want)
			}
			if err := in.Close(); err != nil {
				t.Fatal(err)
			}
			// read fails at the end of its input, and so may the last command.
			_ = cmd.Wait()
		})
	}
	if _, err := hadChildren(1 << 23); err == nil {
		t.Error("a process that does not exist has an account of children")
	}
}

func TestCrowd(t *testing.T) {
	netnstest.Require(t)
	c, err := newCrowd(t.Context(), crowdSize{members: 2, bystanders: 1, perPod: 2, host: 2})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := len(c.processes), c.size.processes(); got != want || want != 8 {
		t.Errorf("%d processes, want %d", got, want)
	}
	host, err := podnetns.OpenHost()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	finder, err := podnetns.NewFinder(podnetns.FinderConfig{
		Host: host, Holders: podnetns.NewPins(), ProcRoot: c.proc,
		NetnsDirs: []string{}, // the processes must do
	})
	if err != nil {
		t.Fatal(err)
	}
	var f figure
	if err := search(t.Context(), finder, c.wanted(), &f); err != nil || len(f.samples) != 1 {
		t.Errorf("%d samples (%v), want one", len(f.samples), err)
	}
	stranger := podnetns.Wanted{UID: newcomer.pod(1).UID, IPs: podAddresses(77)}
	if err := search(t.Context(), finder, []podnetns.Wanted{stranger}, &f); err == nil {
		t.Error("a pod that does not run was found")
	}

	dir := t.TempDir()
	if err := writeCrowd(dir, c); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "pods.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{member.pod(1).UID, bystander.pod(0).UID, "namespace: switched", "namespace: others", "ip: 10.88.0.3", "ip: fd88::3"} {
		if !strings.Contains(string(text), part) {
			t.Errorf("the manifests do not say %q:\n%s", part, text)
		}
	}
	if err := c.disperse(); err != nil {
		t.Error(err)
	}
	nothingLeft(t)
}

func TestSwitchNamespace(t *testing.T) {
	dir := t.TempDir()
	for _, to := range []membership{outside, inMesh, outside} {
		if err := switchNamespace(dir, switched, to); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(dir, "namespace-switched.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(string(text), "istio.io/dataplane-mode: ambient"); got != (to == inMesh) {
			t.Errorf("the manifest says:\n%s", text)
		}
	}
	// The agent reads no file that begins with a dot, but none is to stay either.
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("left: %v (%v)", entries, err)
	}
}

func TestCPUTimeCounts(t *testing.T) {
	before, err := cpuTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	var sum [1]int
	for i := range 50_000_000 {
		sum[0] += i
	}
	after, err := cpuTime(os.Getpid())
	if err != nil || after <= before || sum[0] == 0 {
		t.Errorf("CPU time went from %v to %v (%v)", before, after, err)
	}
	if _, err := cpuTime(1 << 23); err == nil {
		t.Error("a process that does not exist has used CPU time")
	}
}
