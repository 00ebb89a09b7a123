// SPDX-License-Identifier: Apache-2.0

package hostprobe_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"

	"ambientd/iptables/redirection"
)

// TestRandomSequences: pods come, share addresses and go in any order, while the kernel
// refuses now and then. What is there in the end is what the pods own that are there.
func TestRandomSequences(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		random := rand.New(rand.NewPCG(seed, 0))
		r := newRig(t, b)
		r.settle()
		unreliable := func(string, redirection.HostEntry) error {
			if random.IntN(10) == 0 {
				return errKernel
			}
			return nil
		}
		r.kernel.before, r.kernel.after = unreliable, unreliable
		owned := map[string]map[netip.Addr]bool{} // by UID
		for range 500 {
			uid := fmt.Sprintf("p%d", random.IntN(5))
			if random.IntN(3) == 0 {
				_ = r.Remove(t.Context(), uid) // forgets the pod in any case
				delete(owned, uid)
				continue
			}
			addrs := []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(random.IntN(6))})}
			addrs = append(addrs, netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(random.IntN(6))}))
			if r.Add(t.Context(), uid, addrs, nil) != nil {
				continue // owns what it did
			}
			if owned[uid] == nil {
				owned[uid] = map[netip.Addr]bool{}
			}
			for _, a := range addrs {
				owned[uid][a] = true
			}
		}
		r.kernel.before, r.kernel.after = nil, nil
		want := map[string]bool{}
		for _, addrs := range owned {
			for a := range addrs {
				want[a.String()] = true
			}
		}
		r.must(r.Repair(t.Context()))
		var texts []string
		for text := range want {
			texts = append(texts, text)
		}
		r.holds(texts...)
		for i := range 5 {
			r.remove(fmt.Sprintf("p%d", i))
		}
		r.holds()
	})
}

// TestConcurrently: pods come and go side by side, while the audit looks: it never
// sees a difference, since it never sees a half of anything.
func TestConcurrently(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.settle()
		var pods, audits sync.WaitGroup
		for i := range 8 {
			pods.Go(func() {
				uid, own := fmt.Sprintf("p%d", i), netip.AddrFrom4([4]byte{10, 0, 1, byte(i)})
				shared := netip.MustParseAddr("10.0.0.1")
				for range 20 {
					if err := r.Add(t.Context(), uid, []netip.Addr{own, shared}, nil); err != nil {
						t.Error(err)
					}
					if err := r.Remove(t.Context(), uid); err != nil {
						t.Error(err)
					}
				}
			})
		}
		done := make(chan struct{})
		audits.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				if found, err := r.Verify(t.Context()); err != nil || len(found) > 0 {
					t.Errorf("the audit sees %v, %v", found, err)
				}
			}
		})
		pods.Wait()
		close(done)
		audits.Wait()
		r.holds()
	})
}
