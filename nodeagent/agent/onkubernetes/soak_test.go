// SPDX-License-Identifier: Apache-2.0

//go:build apitest

package onkubernetes

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/zds/zdstest"
)

const (
	// wholeSoak is the time of the whole case; shorter ones have a share of its events.
	wholeSoak = 10 * time.Minute
	shortSoak = time.Minute
	// maxStart is what a start may take until all pods are verified.
	maxStart = 10 * time.Second
	// runtimes is how many pods the runtime of a node starts and ends at the same time.
	runtimes = 8
	accounts = 8
)

// soak is a node on which pods come and go while its agent is killed.
type soak struct {
	*cluster
	program  string
	flipping string // the namespace whose label comes and goes; "ambient" at the end
	outside  string // the one that is out of the mesh
	slots    []*life
	agent    *process

	mu   sync.Mutex
	peer *zdstest.Peer // the last one that had its whole snapshot
}

// TestSoak is case 16. SOAK=10m makes it whole.
func TestSoak(t *testing.T) {
	duration := shortSoak
	if value := os.Getenv("SOAK"); value != "" {
		var err error
		duration, err = time.ParseDuration(value)
		must(t, err)
	}
	share := min(1, float64(duration)/float64(wholeSoak))
	s := newSoak(t, max(60, int(300*share)))
	events, kills := int(5000*share), max(3, int(20*share))
	t.Logf("%s: %d pods at a time, %d ADDs and DELs, the agent killed %d times", duration, len(s.slots), events, kills)

	s.agent = s.spawn()
	stop := s.keepProxy()
	defer stop()
	s.fill()
	s.awaitConsistent("all pods in place")
	s.load(events*2/3, duration*2/3, func(ctx context.Context) { s.killAtRandom(ctx, kills, duration*2/3) })
	s.awaitConsistent("as it should be, after all kills")
	s.empty()
	s.awaitConsistent("nothing left")
	before, goroutines := s.agent.footprint(), s.agent.quit()

	// The next agent lives through the rest.
	s.agent = s.spawn()
	s.fill()
	s.load(events/3, duration/3, func(ctx context.Context) { <-ctx.Done() })
	s.awaitConsistent("as it should be, with one agent throughout")
	s.empty()
	s.awaitConsistent("nothing left again")
	after := s.agent.footprint()
	grown := s.agent.quit()
	t.Logf("with no pod: %s, %d goroutines; after %d more events %s, %d goroutines", before, goroutines, events/3, after, grown)
	if after.files > before.files+2 || grown > goroutines+4 || after.netns > before.netns {
		t.Errorf("the agent has grown from %s, %d goroutines to %s, %d goroutines", before, goroutines, after, grown)
	}
	// Memory that was free once may take minutes to go back to the kernel.
	if limit := before.memory*5/4 + 4<<20; after.memory > limit {
		t.Errorf("the agent's own memory has grown from %d to %d KiB", before.memory>>10, after.memory>>10)
	}
	s.wantNoRefusal()
}

func newSoak(t *testing.T, slots int) *soak {
	t.Helper()
	s := &soak{cluster: newCluster(t)}
	s.program = s.build()
	s.flipping, s.outside = s.namespace+"-flip", s.namespace+"-out"
	for _, name := range []string{s.namespace, s.flipping, s.outside} {
		if name != s.namespace {
			s.makeNamespace(name)
		}
		for i := range accounts {
			_, err := s.admin.CoreV1().ServiceAccounts(name).Create(t.Context(),
				&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("sa-", i)}}, metav1.CreateOptions{})
			must(t, err)
		}
	}
	s.label("ambient")
	must(t, s.flip(t.Context(), "ambient"))
	must(t, os.MkdirAll("/run/netns", 0o755))
	for i := range slots {
		s.slots = append(s.slots, newLife(s, i))
	}
	return s
}

func (s *soak) flip(ctx context.Context, mode string) error {
	patch := fmt.Sprintf(`{"metadata": {"labels": {"istio.io/dataplane-mode": %q}}}`, mode)
	_, err := s.admin.CoreV1().Namespaces().Patch(ctx, s.flipping, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	return err
}

// keepProxy is a node proxy that connects again whenever the agent has gone.
func (s *soak) keepProxy() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		for ctx.Err() == nil {
			peer, err := zdstest.Dial(ctx, s.cfg.ZDSSocket, zdstest.AckAll)
			if err == nil {
				if peer.AwaitReady(ctx) == nil {
					s.mu.Lock()
					s.peer = peer
					s.mu.Unlock()
					select {
					case <-peer.Done():
					case <-ctx.Done():
					}
				}
				peer.Close()
			}
			pause(ctx, 50*time.Millisecond)
		}
	})
	return func() { cancel(); running.Wait() }
}

// pause waits, unless ctx ends before.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// each does something with all slots, as many at a time as the runtime can.
func (s *soak) each(do func(l *life) error) {
	s.t.Helper()
	work := make(chan *life)
	var running sync.WaitGroup
	for range runtimes {
		running.Go(func() {
			for l := range work {
				if err := do(l); err != nil {
					s.t.Error(err)
				}
			}
		})
	}
	for _, l := range s.slots {
		work <- l
	}
	close(work)
	running.Wait()
}

func (s *soak) fill() { s.each(func(l *life) error { return l.begin(s.t.Context()) }) }

func (s *soak) empty() { s.each(func(l *life) error { return l.end(s.t.Context()) }) }

// load has pods end and start so often over a time, their labels and a namespace's come and
// go, and meanwhile something else, which ends with its ctx.
func (s *soak) load(events int, over time.Duration, meanwhile func(ctx context.Context)) {
	ctx, cancel := context.WithCancel(s.t.Context())
	var others sync.WaitGroup
	others.Go(func() { meanwhile(ctx) })
	others.Go(func() { s.flipAtRandom(ctx) })
	turns := make(chan struct{})
	var running sync.WaitGroup
	for range runtimes {
		running.Go(func() {
			for range turns {
				if err := s.slots[rand.IntN(len(s.slots))].turn(ctx); err != nil {
					s.t.Error(err)
				}
			}
		})
	}
	rounds := events / 2 // each is an end and a start
	began := time.Now()
	ticker := time.NewTicker(over / time.Duration(rounds))
	defer ticker.Stop()
	for range rounds {
		<-ticker.C
		turns <- struct{}{}
	}
	close(turns)
	running.Wait()
	cancel()
	others.Wait()
	must(s.t, s.flip(s.t.Context(), "ambient"))
	s.t.Logf("%d ADDs and DELs in %s", events, time.Since(began).Round(time.Second))
}

func (s *soak) flipAtRandom(ctx context.Context) {
	for modes := []string{"none", "ambient"}; ctx.Err() == nil; modes[0], modes[1] = modes[1], modes[0] {
		if err := s.flip(ctx, modes[0]); err != nil && ctx.Err() == nil {
			s.t.Error(err)
		}
		for range 5 {
			if err := s.slots[rand.IntN(len(s.slots))].relabel(ctx); err != nil && ctx.Err() == nil {
				s.t.Error(err)
			}
			pause(ctx, rand.N(time.Second))
		}
	}
}

// killAtRandom kills the agent with SIGKILL so often, at random moments of a time.
func (s *soak) killAtRandom(ctx context.Context, kills int, over time.Duration) {
	slowest, pods := time.Duration(0), 0
	for range kills {
		pause(ctx, rand.N(2*over/time.Duration(kills+1)))
		s.agent.kill()
		began := time.Now()
		s.agent = s.spawn()
		took := time.Since(began)
		if took > slowest {
			slowest, pods = took, s.agent.takenUp
		}
		if took > maxStart {
			s.t.Errorf("a start took %s until all pods were verified", took)
		}
	}
	s.t.Logf("the slowest of %d starts took %s until ready, with %d pods taken up", kills, slowest.Round(time.Millisecond), pods)
}

// status asks the agent.
func (s *soak) status() (admin.Status, error) {
	return admin.Fetch(context.WithoutCancel(s.t.Context()), s.cfg.AdminSocketPath())
}
