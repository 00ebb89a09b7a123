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
	"slices"
	"strings"
	"testing"
	"time"

	"ambientd/cni-plugin/podevent"
	"ambientd/tools/apitest"
	"ambientd/tools/enclave"
	"ambientd/tools/netnstest"
)

// TestMain gives the tests a host of their own, and plays counted children and ambientd.
func TestMain(m *testing.M) {
	switch base := filepath.Base(os.Args[0]); {
	case isCounted(base):
		fmt.Println(countedChild(base))
		os.Exit(1)
	case base == "ambientd":
		if err := runAmbientd(os.Args[2:]); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(apitest.Reach(func() int { return netnstest.Main(m) }))
}

func TestParse(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string // in the error; empty: none
	}{
		{nil, ""},
		{[]string{"--rounds=3", "--pods=11", "--results=x"}, ""},
		{[]string{"--rounds=0"}, "--rounds is 0"},
		{[]string{"--pods=10"}, "--pods is 10"},
		{[]string{"quick"}, `"quick"`},
		{[]string{"--parts="}, ""},
		{[]string{"--parts=running,plugin"}, ""},
		{[]string{"--parts=rules"}, `"rules"`},
		{[]string{"--parts=finder", "--backends=nftables"}, ""},
		{[]string{"--backends=nft"}, `"nft"`},
		{[]string{"--api", "--parts=adds,scale"}, ""},
		{[]string{"--parts=adds"}, `"adds"`},
		{[]string{"--api", "--parts=plugin"}, `"plugin"`},
	} {
		cfg, err := parse(c.args, &bytes.Buffer{})
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v gives the error %v, want %q", c.args, err, c.want)
		}
		if err == nil && !filepath.IsAbs(cfg.bin) {
			t.Errorf("%v gives the directory %q, want an absolute path", c.args, cfg.bin)
		}
	}
}

func TestQuantiles(t *testing.T) {
	var f figure
	if f.median() != 0 {
		t.Errorf("the median of nothing is %v", f.median())
	}
	for _, d := range []time.Duration{5, 1, 4, 2, 3, 100, 6, 7, 8, 9, 10} {
		f.add(d)
	}
	if f.median() != 6 || f.quantile(0.9) != 10 || f.quantile(1) != 100 || f.undisturbed().median() != 2 {
		t.Errorf("median %d, p90 %d, maximum %d, undisturbed %d; want 6, 10, 100, 2", f.median(), f.quantile(0.9), f.quantile(1), f.undisturbed().median())
	}
}

func TestLimits(t *testing.T) {
	of := func(d time.Duration) figure { return figure{samples: []time.Duration{d}} }
	const r = 6000 * time.Microsecond
	for _, c := range []struct {
		name string
		row  row
		want bool
	}{
		{"at the limit", duration("", of(100*time.Microsecond), yardstickName, r, 1.0/60, ""), true},
		{"above", duration("", of(101*time.Microsecond), yardstickName, r, 1.0/60, ""), false},
		{"without a reference nothing is within a limit", duration("", of(1), yardstickName, 0, 1.0/60, ""), false},
		{"not measured", duration("", figure{}, yardstickName, r, 1.0/60, ""), false},
		{"without a limit", duration("", of(time.Hour), yardstickName, r, 0, ""), true},
		{"an amount within", amount("", 2, "", 2, ""), true},
		{"an amount above", amount("", 2.1, "", 2, ""), false},
		{"none", none("", 0), true},
		{"one where none is wanted", none("", 1), false},
	} {
		if c.row.Pass != c.want {
			t.Errorf("%s: pass is %v, want %v: %+v", c.name, c.row.Pass, c.want, c.row)
		}
	}
}

func TestResults(t *testing.T) {
	b := &bench{r: figure{samples: []time.Duration{8 * time.Millisecond}}}
	if newResults(b).Pass {
		t.Error("nothing measured counts as success")
	}
	quick := figure{samples: []time.Duration{80 * time.Microsecond}}
	b.rows = []row{
		duration("quick", quick, yardstickName, b.r.median(), 1.0/60, "R/60"),
		amount("size", 2.87, "MiB", 5, "5 MiB"),
		none("children", 0),
	}
	res := newResults(b)
	if !res.Pass {
		t.Error("what is within its limits does not pass")
	}
	b.rows = append(b.rows, duration("slow", b.r, yardstickName, b.r.median(), 0.5, "R/2"))
	res = newResults(b)
	if res.Pass {
		t.Error("a missed limit passes")
	}

	var out bytes.Buffer
	if err := res.print(&out); err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"8000", "= R", "R/100", "R/60", "ok", "1.00 × R", "MISSED", "2.87", "5 MiB", "none      ok"} {
		if !strings.Contains(out.String(), part) {
			t.Errorf("the table has no %q:\n%s", part, out.String())
		}
	}

	dir := filepath.Join(t.TempDir(), "results")
	res.Time = time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC)
	path, err := res.write(dir)
	if err != nil || filepath.Base(path) != "2026-02-03.json" {
		t.Fatalf("written to %s (%v)", path, err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var back results
	if err := json.Unmarshal(text, &back); err != nil || back.Pass || len(back.Rows) != 4 || back.Yardstick.Value != 8000 {
		t.Errorf("read back %+v (%v)", back, err)
	}
}

// Rows of one run are another's, limits and all; results are kept only with them.
func TestSavedRows(t *testing.T) {
	path := filepath.Join(t.TempDir(), "rows.json")
	rows := []row{none("reads", 0), exactly("patches", 2, 1), amount("memory", 34.5, "MB", 35, "35 MB")}
	if err := saveRows(path, rows); err != nil {
		t.Fatal(err)
	}
	b := &bench{cfg: config{add: path}}
	if err := b.addSaved(); err != nil || !slices.Equal(b.rows, rows) {
		t.Errorf("added %+v (%v), want %+v", b.rows, err, rows)
	}
	if newResults(b).Pass {
		t.Error("two where one is wanted passes")
	}
	var out bytes.Buffer
	if err := newResults(b).print(&out); err != nil || strings.Contains(out.String(), "= R") {
		t.Errorf("the table without a yardstick (%v):\n%s", err, out.String())
	}
	b.cfg.add = path + ".not"
	if err := b.addSaved(); err == nil {
		t.Error("rows that are not there are no error")
	}
	complete := config{add: path, parts: partNames(), backends: backendNames()}
	if !complete.complete() {
		t.Error("a run with all is not complete")
	}
	complete.add = ""
	if complete.complete() {
		t.Error("a run without the API server's rows is complete")
	}
}

func TestMemoryOf(t *testing.T) {
	memory, err := memoryOf(os.Getpid())
	if err != nil || memory["VmRSS"] <= 0 || memory["VmHWM"] < memory["RssAnon"] {
		t.Errorf("got %v (%v)", memory, err)
	}
	if _, err := memoryOf(1 << 23); err == nil {
		t.Error("a process that does not exist has memory")
	}
}

func TestCreation(t *testing.T) {
	const saved = `# Generated by iptables-nft-save
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [12:345]
:AMBIENTD_OUTPUT - [0:0]
-A OUTPUT -j AMBIENTD_OUTPUT
-A AMBIENTD_OUTPUT -p tcp -j REDIRECT --to-ports 15001
COMMIT
# Completed
`
	const want = `*nat
-N AMBIENTD_OUTPUT
-A OUTPUT -j AMBIENTD_OUTPUT
-A AMBIENTD_OUTPUT -p tcp -j REDIRECT --to-ports 15001
COMMIT
`
	if got := creation(saved); got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
}

func TestCounter(t *testing.T) {
	if _, err := exec.LookPath("iptables-nft-save"); err != nil {
		t.Skipf("iptables-nft-save is needed: %v", err)
	}
	c, err := newCounter(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(countEnv, c.marks)
	t.Setenv(realPathEnv, os.Getenv("PATH"))
	var out []byte
	got, err := c.count(func() error {
		for range 3 {
			if out, err = exec.Command(filepath.Join(c.dir, "iptables-nft-save"), "--version").CombinedOutput(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil || got != 3 {
		t.Errorf("counted %d (%v: %s), want 3", got, err, out)
	}
	if !strings.HasPrefix(string(out), "iptables-nft-save v") {
		t.Errorf("what ran in the end says %q, want the real program", out)
	}
	if got, err := c.count(func() error { return nil }); err != nil || got != 0 {
		t.Errorf("counting starts at %d (%v), want 0", got, err)
	}
}

func TestInstantAgent(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "agent.sock")
	agent, err := startInstantAgent(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	netns, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Close()
	request := podevent.Request{Command: podevent.CommandAdd, Network: "bench", ContainerID: "c", IfName: "eth0", Pod: passing.pod(1)}
	reply, err := podevent.Call(t.Context(), socket, request, netns)
	if err != nil || reply.Result != podevent.ResultEnrolled {
		t.Errorf("got %+v (%v)", reply, err)
	}
	if err := agent.stop(); err != nil || agent.answered() != 1 {
		t.Errorf("answered %d (%v), want 1", agent.answered(), err)
	}
}

func TestInstantAgentReportsBadRequests(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "agent.sock")
	agent, err := startInstantAgent(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	// No word is no request; the agent's end of the connection says that it has seen that.
	if err := conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n, err := conn.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("read %d bytes (%v), want the end", n, err)
	}
	if err := errors.Join(conn.Close(), agent.stop()); err == nil {
		t.Error("a request that was none is no error")
	}
}

func TestManifestsHoldEveryPod(t *testing.T) {
	dir := t.TempDir()
	if err := writeManifests(dir, 20); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "all.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Count(string(text), "---\n"), 1+20+2*batch; got != want {
		t.Errorf("%d documents, want %d", got, want)
	}
	uids := map[string]bool{}
	for _, k := range []kind{stayer, passing, newcomer} {
		for i := range 20 {
			uids[k.pod(i).UID] = true
			if !strings.Contains(string(text), "uid: "+k.pod(i).UID) {
				t.Errorf("pod %s is missing", k.pod(i))
			}
		}
	}
	if len(uids) != 60 {
		t.Errorf("60 pods have %d UIDs", len(uids))
	}
	// Newcomers bring in identities, passing pods find theirs with the first stayers.
	if passing.account(3) != stayer.account(3) || newcomer.account(3) == newcomer.account(13) {
		t.Error("service accounts are not shared as they should be")
	}
	if fewPods < sharedAccounts {
		t.Errorf("%d pods do not bring in %d accounts", fewPods, sharedAccounts)
	}
}

// TestRulesOnce runs one round of the rules' part, limits aside.
func TestRulesOnce(t *testing.T) {
	requireRestore(t)
	b := &bench{cfg: config{rounds: 1}, dir: t.TempDir(), progress: &bytes.Buffer{}}
	if err := errors.Join(b.rules(t.Context()), b.close()); err != nil {
		t.Fatal(err)
	}
	if b.r.median() <= 0 {
		t.Error("the yardstick was not measured")
	}
	if children := find(t, b.rows, "child processes of a verify").Value; children < 1 || children > 2 {
		t.Errorf("a verify has %v children, want 1 or 2", children)
	}
	allMeasured(t, b.rows)
	nothingLeft(t)
}

// requireRestore skips the test where the yardstick cannot be measured.
func requireRestore(t *testing.T) {
	t.Helper()
	netnstest.Require(t)
	for _, program := range []string{"iptables-nft-restore", "ip6tables-nft-restore"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%s is needed: %v", program, err)
		}
	}
}

// find returns the row whose name contains the text.
func find(t *testing.T, rows []row, text string) row {
	t.Helper()
	i := slices.IndexFunc(rows, func(r row) bool { return strings.Contains(r.Name, text) })
	if i < 0 {
		t.Fatalf("no row says %q: %+v", text, rows)
	}
	return rows[i]
}

func allMeasured(t *testing.T, rows []row) {
	t.Helper()
	for _, r := range rows {
		if r.Unit == "µs" && r.Value <= 0 {
			t.Errorf("not measured: %+v", r)
		}
	}
}

func nothingLeft(t *testing.T) {
	t.Helper()
	if left, err := os.ReadDir(enclave.NetnsDir); err != nil || len(left) > 0 {
		t.Errorf("left in %s: %v (%v)", enclave.NetnsDir, left, err)
	}
	if left, err := filepath.Glob("/run/proc-*"); err != nil || len(left) > 0 {
		t.Errorf("left: %v (%v)", left, err)
	}
}
