// SPDX-License-Identifier: Apache-2.0

package zds_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"ambientd/nodeagent/zds"
	"ambientd/nodeagent/zds/zdstest"
)

// TestRandomProxies has adds, dels, adds that replace others and adds that are given up,
// against proxies that refuse, dawdle and hang up at random. In the end the proxy has
// the set, no refused pod, and nothing is held.
func TestRandomProxies(t *testing.T) {
	const workers, rounds, pods = 24, 60, 40
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	s := start(t, patient)
	before := openFiles(t)

	var honest atomic.Bool
	var work sync.WaitGroup
	for w := range workers {
		work.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(w)))
			for range rounds {
				s.doSomething(rng, rng.IntN(pods))
			}
		})
	}
	worked := make(chan struct{})
	go func() { work.Wait(); close(worked) }()

	last := s.reconnecting(worked, &honest, seed)
	// The last proxy has every message by the time that it has answered this one.
	s.must(s.Del(s.ctx, "nobody"))
	s.must(s.Del(s.ctx, "nobody")) // and what it refused before that has been taken back
	held := 0
	for i := range pods {
		uid := pod(i).UID
		_, has := last.State().Pods[uid]
		if holds := s.Holds(uid); holds != has || holds != s.Acked(uid) {
			t.Errorf("%s: in the set %t, with the proxy %t, acked %t", uid, holds, has, s.Acked(uid))
		}
		if s.Holds(uid) {
			held++
		}
	}
	if st := last.State(); len(st.Refused) != 0 {
		t.Errorf("%d refused pods were not taken back", len(st.Refused))
	}
	t.Logf("%d pods in the end, %d messages on the last stream", held, len(last.State().Events))
	for i := range pods {
		s.must(s.Del(s.ctx, pod(i).UID))
	}
	last.Close()
	s.await("no peer is left", func() bool { return len(s.Peers()) == 0 })
	if after := openFiles(t); after > before {
		t.Errorf("%d descriptors are held in the end", after-before)
	}
}

// doSomething does one thing to a pod.
func (s *server) doSomething(rng *rand.Rand, i int) {
	ctx, w := s.ctx, pod(i)
	var err error
	switch rng.IntN(8) {
	case 0, 1:
		err = s.Del(ctx, w.UID)
	case 2:
		err = s.Put(w, s.netns)
	case 3:
		impatient, cancel := context.WithTimeout(ctx, time.Duration(rng.IntN(2000))*time.Microsecond)
		defer cancel()
		err = s.Add(impatient, w, s.netns)
	case 4:
		w.Name += "-again" // the same pod for the proxy, another for the set
		fallthrough
	default:
		err = s.Add(ctx, w, s.netns)
	}
	var nack *zds.NackError
	switch {
	case err == nil, errors.As(err, &nack), errors.Is(err, zds.ErrSuperseded):
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
	default:
		s.t.Errorf("%s: %v", w.UID, err)
	}
}

// reconnecting has one proxy after the other, until the work is done and one of them is
// ready: that is honest from then on, and returned.
func (s *server) reconnecting(worked <-chan struct{}, honest *atomic.Bool, seed uint64) *zdstest.Peer {
	s.t.Helper()
	for stream := uint64(0); ; stream++ {
		rng := rand.New(rand.NewPCG(seed, 1000+stream))
		p := s.peer(func(ctx context.Context, e zdstest.Event) zdstest.Answer {
			return someAnswer(ctx, rng, e, honest)
		})
		select {
		case <-p.Done():
			continue
		case <-s.ctx.Done():
			s.t.Fatal("the work is not done in time")
		case <-worked:
			honest.Store(true)
		}
		if p.AwaitReady(s.ctx) == nil {
			return p
		}
	}
}

func someAnswer(ctx context.Context, rng *rand.Rand, e zdstest.Event, honest *atomic.Bool) zdstest.Answer {
	if honest.Load() {
		return zdstest.Ack()
	}
	switch n := rng.IntN(100); {
	case n < 2:
		return zdstest.Hangup()
	case n < 12 && e.Kind == zdstest.Add:
		return zdstest.Nack("at random")
	case n < 30:
		select {
		case <-time.After(time.Duration(rng.IntN(300)) * time.Microsecond):
		case <-ctx.Done():
		}
	}
	return zdstest.Ack()
}
