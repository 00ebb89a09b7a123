// SPDX-License-Identifier: Apache-2.0

package audit_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"ambientd/iptables/netnswatch"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/audit"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/podnetns"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

const interval = 30 * time.Second

// world is what an Auditor sees. Its pods are healthy unless a test says otherwise; its
// clock is the bubble's. What a real kernel shows is in faults_test.go.
type world struct {
	t       *testing.T
	changed chan struct{}
	events  chan netnswatch.ID

	mu       sync.Mutex
	log      bytes.Buffer
	took     time.Duration              // by one audit
	late     bool                       // pods go right after an audit has looked at them
	touched  []string                   // UIDs of those that have changed and were not asked for
	netns    map[string]*podnetns.Netns // by UID, of those enrolled
	audits   map[string][]time.Time     // by UID; "" is the host
	findings map[string]enroll.Finding  // what the next audits find
	hostErr  error
	hostGone bool // until it is repaired
	running  int
	most     int                               // running at once
	numbers  map[netnswatch.ID]string          // watched, by netns cookie
	open     map[netnswatch.ID]*podnetns.Netns // the same as they were handed over
	last     netnswatch.ID
	counts   map[string]int
}

// namespaces makes network namespaces, outside of any bubble.
func namespaces(t *testing.T, n int) []*podnetns.Netns {
	t.Helper()
	netnstest.Require(t)
	host, err := podnetns.OpenHost()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { host.Close() })
	all := make([]*podnetns.Netns, n)
	for i := range all {
		if all[i], err = host.Scratch(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { all[i].Close() })
	}
	return all
}

// in runs a test in a bubble, with an Auditor that runs.
func in(t *testing.T, pods []*podnetns.Netns, prepare func(w *world), test func(w *world, a *audit.Auditor)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{
			t: t, changed: make(chan struct{}, 1), events: make(chan netnswatch.ID),
			netns: map[string]*podnetns.Netns{}, audits: map[string][]time.Time{}, findings: map[string]enroll.Finding{},
			numbers: map[netnswatch.ID]string{}, open: map[netnswatch.ID]*podnetns.Netns{}, counts: map[string]int{},
		}
		for i, ns := range pods {
			w.netns[fmt.Sprint("uid-", i)] = ns
		}
		if prepare != nil {
			prepare(w)
		}
		a, err := audit.New(audit.Config{
			Pods: w, Changes: w, Pins: pins{w}, Host: w, Watcher: w, Interval: interval, Recorder: w, Logger: slog.New(slog.NewTextHandler(w, nil)),
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- a.Run(ctx) }()
		test(w, a)
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run ended with %v", err)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.running != 0 {
			t.Errorf("%d audits are at work after Run", w.running)
		}
	})
}

type pins struct{ *world }

func (p pins) Get(uid string) (*podnetns.Netns, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	ns, ok := p.netns[uid]
	return ns, ok
}

func (w *world) Enrolled() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var uids []string
	for uid := range w.netns {
		uids = append(uids, uid)
	}
	return uids
}

func (w *world) Changed() <-chan struct{} { return w.changed }

func (w *world) Changes() (gone, enrolled []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, uid := range w.touched {
		if _, ok := w.netns[uid]; ok {
			enrolled = append(enrolled, uid)
		} else {
			gone = append(gone, uid)
		}
	}
	w.touched = nil
	return gone, enrolled
}

// enrol puts a pod in, or in another netns; nil takes it out.
func (w *world) enrol(uid string, ns *podnetns.Netns) {
	w.mu.Lock()
	delete(w.netns, uid)
	if ns != nil {
		w.netns[uid] = ns
	}
	w.touched = append(w.touched, uid)
	w.mu.Unlock()
	w.changed <- struct{}{}
	synctest.Wait()
}

func (w *world) Audit(ctx context.Context, uid string) (enroll.Finding, bool) {
	if took := w.begin(uid); took > 0 {
		select {
		case <-time.After(took):
		case <-ctx.Done():
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.running--
	if _, ok := w.netns[uid]; !ok && !w.late {
		return enroll.Finding{}, false
	}
	f := w.findings[uid]
	f.UID, f.Pod = uid, "shop/"+uid
	if f.Err == nil {
		delete(w.findings, uid) // repaired
	}
	return f, true
}

// begin counts an audit, and returns how long it takes.
func (w *world) begin(uid string) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.audits[uid] = append(w.audits[uid], time.Now())
	w.running++
	w.most = max(w.most, w.running)
	return w.took
}

func (w *world) Verify(context.Context) ([]redirection.Difference, error) {
	took := w.begin("")
	w.mu.Lock()
	gone, err := w.hostGone, w.hostErr
	w.mu.Unlock()
	time.Sleep(took) // between looking and repairing
	w.mu.Lock()
	defer w.mu.Unlock()
	w.running--
	if err != nil || !gone {
		return nil, err
	}
	return []redirection.Difference{{What: "table ambientd-host", Want: "with 1 entries"}}, nil
}

func (w *world) Repair(context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hostGone = false
	return nil
}

func (w *world) Watch(_ context.Context, watched netnswatch.Netns) (netnswatch.ID, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, ns := range w.netns {
		if ns.File() == watched.File() {
			for number, cookie := range w.numbers {
				if cookie == ns.Key().String() {
					w.open[number] = ns
					return number, nil
				}
			}
			w.last++
			w.open[w.last] = ns
			w.numbers[w.last] = ns.Key().String()
			return w.last, nil
		}
	}
	return 0, os.ErrClosed
}

func (w *world) Unwatch(id netnswatch.ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, ok := w.numbers[id]; !ok {
		w.t.Errorf("%d was unwatched, and not watched", id)
	}
	delete(w.numbers, id)
	delete(w.open, id)
}

func (w *world) Events() <-chan netnswatch.ID { return w.events }

func (w *world) Audited(subject string, _ time.Duration) { w.count("audited " + subject) }
func (w *world) Repaired(part string)                    { w.count("repaired " + part) }
func (w *world) RepairFailed(subject string)             { w.count("failed " + subject) }

func (w *world) count(what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.counts[what]++
}

func (w *world) counted(what string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.counts[what]
}

// Write keeps what is logged.
func (w *world) Write(line []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.Write(line)
}

func (w *world) logged() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.String()
}

// locked changes or reads the world while the Auditor runs.
func (w *world) locked(do func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	do()
}

// change makes a notification, as the kernel does for whatever happens in a netns.
func (w *world) change(uid string) {
	w.mu.Lock()
	id := netnswatch.Own
	for number, cookie := range w.numbers {
		if ns := w.netns[uid]; ns != nil && ns.Key().String() == cookie {
			id = number
		}
	}
	w.mu.Unlock()
	w.events <- id
}

func (w *world) of(uid string) []time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]time.Time(nil), w.audits[uid]...)
}

// after returns how often the subject was audited since.
func (w *world) after(uid string, since time.Time) (n int) {
	for _, at := range w.of(uid) {
		if !at.Before(since) {
			n++
		}
	}
	return n
}

// find makes the next audits of a pod find something.
func (w *world) find(uid string, f enroll.Finding) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.findings[uid] = f
}

func pass(d time.Duration) {
	time.Sleep(d) // of the bubble's clock
	synctest.Wait()
}

// Each pod, and the host, is looked at once an interval, and the work is spread over it.
func TestAuditsAreSpread(t *testing.T) {
	const pods, rounds = 100, 10
	in(t, namespaces(t, pods), nil, func(w *world, _ *audit.Auditor) {
		began := time.Now()
		pass(rounds * interval)
		perSecond := map[int]int{}
		for i := range pods {
			audits := w.of(fmt.Sprint("uid-", i))
			if len(audits) < rounds-2 || len(audits) > rounds+2 {
				t.Errorf("pod %d was audited %d times in %d intervals", i, len(audits), rounds)
			}
			last := began
			for _, at := range audits {
				if pause := at.Sub(last); pause > interval*11/10 {
					t.Errorf("pod %d was not audited for %s", i, pause)
				}
				last = at
				perSecond[int(at.Sub(began).Seconds())]++
			}
		}
		for second, n := range perSecond {
			if n > 4*pods/int(interval.Seconds()) {
				t.Errorf("%d audits in second %d", n, second)
			}
		}
		if n := len(w.of("")); n < rounds-2 || n > rounds+2 {
			t.Errorf("the host was audited %d times", n)
		}
	})
}

// A notification prompts one audit, soon, of what it is about and of nothing else.
func TestNotificationPrompts(t *testing.T) {
	in(t, namespaces(t, 2), nil, func(w *world, _ *audit.Auditor) {
		for _, uid := range []string{"uid-0", ""} {
			pass(time.Second)
			now := time.Now()
			for range 20 { // as a flush of several tables makes
				w.change(uid)
				pass(time.Millisecond)
			}
			pass(time.Second)
			if n := w.after(uid, now); n != 1 {
				t.Errorf("%q was audited %d times, want once", uid, n)
			}
			if n := w.after("uid-1", now); n > 1 {
				t.Errorf("the other pod was audited %d times", n)
			}
		}
		now := time.Now()
		w.events <- netnswatch.All // the kernel has lost some
		pass(time.Second)
		for _, uid := range []string{"uid-0", "uid-1", ""} {
			if w.after(uid, now) == 0 {
				t.Errorf("%q was not audited when notifications were lost", uid)
			}
		}
		w.events <- 4711 // of nobody
		pass(time.Millisecond)
	})
}

// A change while an audit is at work is looked at once more: the audit may have read
// before it.
func TestNotificationDuringAnAudit(t *testing.T) {
	in(t, namespaces(t, 1), func(w *world) { w.took = 5 * time.Second }, func(w *world, _ *audit.Auditor) {
		pass(time.Millisecond)
		now := time.Now()
		w.change("uid-0")
		pass(time.Second)
		if n := w.after("uid-0", now); n != 1 {
			t.Fatalf("audited %d times, want once so far", n)
		}
		w.change("uid-0")
		pass(6 * time.Second)
		if n := w.after("uid-0", now); n != 2 {
			t.Errorf("audited %d times, want once more", n)
		}
	})
}

// A repair's own notification prompts one audit, which finds nothing and ends it.
func TestRepairIsQuiet(t *testing.T) {
	in(t, namespaces(t, 1), nil, func(w *world, a *audit.Auditor) {
		pass(time.Second)
		now := time.Now()
		w.find("uid-0", enroll.Finding{Differences: []string{"chain nat_output: missing"}, Parts: []string{"redirection"}})
		w.change("uid-0")
		pass(150 * time.Millisecond)
		w.change("uid-0") // the repair's
		pass(10 * time.Second)
		if n := w.after("uid-0", now); n < 2 || n > 3 {
			t.Errorf("audited %d times, want twice and at most a regular time", n)
		}
		if w.counted("repaired redirection") != 1 || strings.Count(w.logged(), "audit has repaired what differed\" subject=pod") != 1 {
			t.Errorf("counted %d, logged %s", w.counted("repaired redirection"), w.logged())
		}
		status := a.PodStatus("uid-0")
		if status.Repairs != 1 || len(status.Repaired) != 1 || status.LastRepair.Before(now) || status.Error != "" {
			t.Errorf("status %+v", status)
		}
	})
}

// Who undoes every repair, or changes its own rules all the time, has no more than so
// many audits.
func TestBudget(t *testing.T) {
	in(t, namespaces(t, 2), nil, func(w *world, _ *audit.Auditor) {
		for range 10 * 60 * 4 { // ten minutes
			w.change("uid-0")
			pass(250 * time.Millisecond)
		}
		// 10 an interval, 20 intervals, and the regular ones and the first burst.
		if n := len(w.of("uid-0")); n < 150 || n > 10*20+10+25 {
			t.Errorf("audited %d times in ten minutes", n)
		}
		pass(interval)
		now := time.Now()
		w.change("uid-0") // after a rest it is prompt again
		pass(time.Second)
		if w.after("uid-0", now) == 0 {
			t.Error("not audited after a rest")
		}
	})
}

// What fails is tried again sooner than after an interval, with a growing pause, and
// told once.
func TestFailuresBackOff(t *testing.T) {
	in(t, namespaces(t, 1), nil, func(w *world, a *audit.Auditor) {
		w.find("uid-0", enroll.Finding{Differences: []string{"chain nat_output: missing"}, Err: errors.New("no memory")})
		pass(3 * interval)
		audits := w.of("uid-0")
		last := time.Duration(0)
		for i := 1; i < len(audits); i++ {
			pause := audits[i].Sub(audits[i-1])
			if want := min(time.Second<<(i-1), interval); pause < want*9/10 || pause > want*11/10+time.Millisecond {
				t.Errorf("pause %d is %s, want about %s", i, pause, want)
			}
			last = pause
		}
		if last < interval/4 {
			t.Errorf("the last pause is %s", last)
		}
		if n := strings.Count(w.logged(), "no memory"); n != 1 {
			t.Errorf("told %d times, want once: %s", n, w.logged())
		}
		if status := a.PodStatus("uid-0"); status.Error != "no memory" || status.Repairs != 0 {
			t.Errorf("status %+v", status)
		}
		w.find("uid-0", enroll.Finding{Differences: []string{"chain nat_output: missing"}, Parts: []string{"redirection"}})
		pass(interval * 11 / 10)
		if status := a.PodStatus("uid-0"); status.Error != "" || status.Repairs != 1 {
			t.Errorf("after the repair: %+v", status)
		}
		w.find("uid-0", enroll.Finding{Err: errors.New("no memory")})
		pass(interval * 11 / 10)
		if n := strings.Count(w.logged(), "no memory"); n != 2 {
			t.Errorf("a new failure was told %d times, want once more: %s", n, w.logged())
		}
	})
}

func TestHostIsRepaired(t *testing.T) {
	in(t, nil, func(w *world) { w.hostGone = true }, func(w *world, a *audit.Auditor) {
		pass(interval)
		if w.counted("repaired host probes") != 1 || strings.Count(w.logged(), "audit has repaired what differed\" subject=host") != 1 {
			t.Errorf("counted %d, logged %s", w.counted("repaired host probes"), w.logged())
		}
		if status := a.HostStatus(); status.Repairs != 1 || status.Error != "" {
			t.Errorf("status %+v", status)
		}
		w.locked(func() { w.hostErr = errors.New("locked") })
		differences, err := a.Host(w.t.Context())
		if err == nil || len(differences) != 0 || a.HostStatus().Error != "locked" {
			t.Errorf("got %v, %v, status %+v", differences, err, a.HostStatus())
		}
	})
}

// Whoever asks while the host is audited waits: what differs is found, told and counted
// once.
func TestHostIsAuditedOnceAtATime(t *testing.T) {
	in(t, nil, func(w *world) { w.hostGone, w.took = true, time.Second }, func(w *world, a *audit.Auditor) {
		var asked sync.WaitGroup
		for range 5 {
			asked.Go(func() {
				if _, err := a.Host(w.t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		asked.Wait()
		if w.counted("repaired host probes") != 1 || a.HostStatus().Repairs != 1 {
			t.Errorf("counted %d, status %+v", w.counted("repaired host probes"), a.HostStatus())
		}
	})
}

// Many damaged pods leave room for others' work.
func TestFewAtOnce(t *testing.T) {
	const pods = 30
	in(t, namespaces(t, pods), func(w *world) { w.took = time.Second }, func(w *world, a *audit.Auditor) {
		pass(time.Millisecond)
		w.events <- netnswatch.All
		var onDemand sync.WaitGroup
		onDemand.Go(func() {
			if found := a.Pods(w.t.Context(), nil); len(found) != pods {
				t.Errorf("%d pods were audited on demand, want %d", len(found), pods)
			}
		})
		onDemand.Wait()
		w.locked(func() {
			if w.most > 4 {
				t.Errorf("%d audits were at work at once", w.most)
			}
		})
	})
}

// Pods come, move and go; what is watched follows, and results of those that have gone
// are forgotten.
func TestFollowsPods(t *testing.T) {
	spaces := namespaces(t, 3)
	in(t, spaces[:1], nil, func(w *world, a *audit.Auditor) {
		pass(interval * 11 / 10)
		watched := func() string {
			w.mu.Lock()
			defer w.mu.Unlock()
			var all []string
			for _, ns := range spaces {
				for _, cookie := range w.numbers {
					if cookie == ns.Key().String() {
						all = append(all, cookie)
					}
				}
			}
			return strings.Join(all, " ")
		}
		key := func(i int) string { return spaces[i].Key().String() }
		if got := watched(); got != key(0) {
			t.Errorf("watched: %s, want %s", got, key(0))
		}
		w.enrol("uid-1", spaces[1])
		if got, want := watched(), key(0)+" "+key(1); got != want {
			t.Errorf("with another pod watched: %s, want %s", got, want)
		}
		w.enrol("uid-0", spaces[2]) // it has moved
		if got, want := watched(), key(1)+" "+key(2); got != want {
			t.Errorf("after a move watched: %s, want %s", got, want)
		}
		now := time.Now()
		w.change("uid-0")
		pass(time.Second)
		if w.after("uid-0", now) == 0 {
			t.Error("a pod that has moved is not audited on a notification")
		}
		if a.PodStatus("uid-0").LastAudit.IsZero() {
			t.Error("no result of a pod that was audited")
		}
		w.enrol("uid-0", nil)
		if got := watched(); got != key(1) {
			t.Errorf("without the pod watched: %s, want %s", got, key(1))
		}
		if !a.PodStatus("uid-0").LastAudit.IsZero() {
			t.Error("the result of a pod that has gone is kept")
		}
		now = time.Now()
		pass(2 * interval)
		if n := w.after("uid-0", now); n != 0 {
			t.Errorf("a pod that has gone was audited %d times", n)
		}
	})
}

// A pod that goes while it is audited leaves no result behind, whoever asked for the
// audit.
func TestNoResultOfAPodThatHasGone(t *testing.T) {
	for name, began := range map[string]func(w *world, a *audit.Auditor){
		"by schedule":   func(w *world, _ *audit.Auditor) { w.change("uid-0") },
		"on demand":     func(w *world, a *audit.Auditor) { go a.Pods(w.t.Context(), nil) },
		"both, at once": func(w *world, a *audit.Auditor) { go a.Pods(w.t.Context(), nil); w.change("uid-0") },
	} {
		t.Run(name, func(t *testing.T) {
			prepare := func(w *world) { w.took, w.late = time.Second, true }
			in(t, namespaces(t, 1), prepare, func(w *world, a *audit.Auditor) {
				synctest.Wait()
				began(w, a)
				pass(time.Second / 2)
				w.enrol("uid-0", nil)
				pass(3 * time.Second)
				if len(w.of("uid-0")) == 0 {
					t.Error("there was no audit")
				}
				if !a.PodStatus("uid-0").LastAudit.IsZero() {
					t.Error("the result of a pod that went while it was audited is kept")
				}
			})
		})
	}
}

func TestOnDemand(t *testing.T) {
	in(t, namespaces(t, 3), nil, func(w *world, a *audit.Auditor) {
		w.find("uid-1", enroll.Finding{Differences: []string{"route: missing"}, Parts: []string{"redirection"}})
		found := a.Pods(w.t.Context(), []string{"uid-1", "nobody", "uid-2"})
		if len(found) != 2 || found[0].UID != "uid-1" || len(found[0].Differences) != 1 || found[1].UID != "uid-2" || len(found[1].Differences) != 0 {
			t.Errorf("found %+v", found)
		}
		if w.counted("repaired redirection") != 1 || a.PodStatus("uid-1").Repairs != 1 {
			t.Errorf("counted %d, status %+v", w.counted("repaired redirection"), a.PodStatus("uid-1"))
		}
		ended, cancel := context.WithCancel(w.t.Context())
		cancel()
		w.locked(func() { w.took = time.Second })
		if found := a.Pods(ended, nil); len(found) > 3 {
			t.Errorf("found %+v", found)
		}
	})
}

// A table that was flushed differs in every rule; the log and the status show a few.
func TestManyDifferences(t *testing.T) {
	in(t, namespaces(t, 1), nil, func(w *world, a *audit.Auditor) {
		var f enroll.Finding
		for i := range 40 {
			f.Differences = append(f.Differences, fmt.Sprintf("rule %d: missing", i))
		}
		f.Parts = []string{"redirection"}
		w.find("uid-0", f)
		if found := a.Pods(w.t.Context(), nil); len(found[0].Differences) != 40 {
			t.Errorf("who asked was told %d of 40", len(found[0].Differences))
		}
		shown := a.PodStatus("uid-0").Repaired
		if len(shown) != 9 || shown[8] != "and 32 more" || strings.Contains(w.logged(), "rule 20") {
			t.Errorf("status shows %v, log %s", shown, w.logged())
		}
	})
}

func TestConfig(t *testing.T) {
	good := audit.Config{Pods: &world{}, Changes: &world{}, Pins: pins{}, Host: &world{}, Interval: time.Second, Recorder: &world{}, Logger: slog.Default()}
	if _, err := audit.New(good); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*audit.Config){
		"Pods": func(c *audit.Config) { c.Pods = nil }, "Changes": func(c *audit.Config) { c.Changes = nil }, "Pins": func(c *audit.Config) { c.Pins = nil },
		"Host": func(c *audit.Config) { c.Host = nil }, "Recorder": func(c *audit.Config) { c.Recorder = nil },
		"Logger": func(c *audit.Config) { c.Logger = nil }, "interval": func(c *audit.Config) { c.Interval = 0 },
	} {
		cfg := good
		change(&cfg)
		if _, err := audit.New(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("without %s: %v", want, err)
		}
	}
}
