// SPDX-License-Identifier: Apache-2.0

package hostprobe_test

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"ambientd/iptables/redirection"
	"ambientd/nodeagent/hostprobe"
)

// TestEntries: what pods with these addresses and ports put into the sets.
func TestEntries(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		for _, test := range []struct {
			name    string
			change  func(*redirection.HostOptions)
			targets []string
			want    []string
		}{
			{"addresses", asUsual, []string{"fd00::2", "10.0.0.2"}, []string{"10.0.0.2", "fd00::2"}},
			{"ports do not count", asUsual, []string{"10.0.0.2", ":80"}, []string{"10.0.0.2"}},
			{"one address twice", asUsual, []string{"10.0.0.2", "10.0.0.2", "::ffff:10.0.0.2"}, []string{"10.0.0.2"}},
			{"no address yet", asUsual, []string{":80"}, nil},
			{"no set for IPv6", ipv4Only, []string{"10.0.0.2", "fd00::2"}, []string{"10.0.0.2"}},
			{
				"declared", declared, []string{"10.0.0.2", "fd00::2", ":80", ":8080", ":80"},
				[]string{"10.0.0.2:80", "10.0.0.2:8080", "[fd00::2]:80", "[fd00::2]:8080"},
			},
			{"none declared", declared, []string{"10.0.0.2"}, nil},
		} {
			t.Run(test.name, func(t *testing.T) {
				r := newRig(t, b, test.change)
				r.settle()
				r.add("p1", test.targets...)
				r.holds(test.want...)
				r.remove("p1")
				r.holds()
			})
		}
	})
}

// TestAddGrows: what a pod owns is added to, and taken away only as a whole.
func TestAddGrows(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.settle()
		r.add("p1", "10.0.0.2")
		r.add("p1", "10.0.0.3")
		r.add("p1") // its addresses are known, whatever this call knew
		r.add("p2", "10.0.0.4")
		r.remove("p2")
		r.add("p2", "10.0.0.3")
		r.holds("10.0.0.2", "10.0.0.3")
		r.remove("p1")
		r.holds("10.0.0.3")
		r.add("p1", "10.0.0.2")
		r.remove("p2")
		r.holds("10.0.0.2")
		r.remove("never added")
		r.holds("10.0.0.2")
	})
}

func TestAddRefuses(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b, declared)
		r.settle()
		r.add("p0", "10.0.0.9") // no port, no entry
		many := make([]uint16, hostprobe.MaxEntriesPerPod)
		for i := range many {
			many[i] = uint16(i) + 1
		}
		addr := netip.MustParseAddr("10.0.0.2")
		for _, test := range []struct {
			name  string
			addrs []netip.Addr
			ports []uint16
			want  string
		}{
			{"zero address", make([]netip.Addr, 1), many[:1], "no address of a pod"},
			{"unspecified address", []netip.Addr{netip.IPv4Unspecified()}, many[:1], "0.0.0.0"},
			{"address with a zone", []netip.Addr{netip.MustParseAddr("fe80::1%eth0")}, many[:1], "eth0"},
			{"no port", []netip.Addr{addr}, []uint16{0}, "a port is expected"},
			{"too many", []netip.Addr{addr}, append(slices.Clone(many), 9999), "513 probe entries, of which at most 512"},
		} {
			wantError(t, test.name, r.Add(t.Context(), "p1", test.addrs, test.ports), test.want)
		}
		r.holds()
		r.must(r.Add(t.Context(), "p1", []netip.Addr{addr}, many))
		r.must(r.Add(t.Context(), "p1", []netip.Addr{addr}, many[:7]))
		wantError(t, "bit by bit", r.Add(t.Context(), "p1", []netip.Addr{addr}, []uint16{9999}), "513 probe entries")
		r.remove("p1")
		r.holds()
	})
}

func TestNewRefuses(t *testing.T) {
	run := func(fn func() error) error { return fn() }
	good := redirection.HostOptions{
		ProbeSourceIPv4: redirection.DefaultOptions().ProbeSourceIPv4, Scope: redirection.ProbeScopePod,
	}
	for _, test := range []struct {
		name string
		cfg  hostprobe.Config
		want string
	}{
		{"backend", hostprobe.Config{Run: run, Options: good}, "a backend"},
		{"runner", hostprobe.Config{Kernel: &unreliable{}, Options: good}, "a runner"},
		{"options", hostprobe.Config{Kernel: &unreliable{}, Run: run}, "probe scope"},
	} {
		_, err := hostprobe.New(test.cfg)
		wantError(t, test.name, err, test.want)
	}
}

// TestRestart: a new agent keeps the entries of pods that it has not met yet, however
// damaged the rest is, until it is told that it has met all.
func TestRestart(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.settle()
		r.add("p1", "10.0.0.1", "fd00::1")
		r.add("p2", "10.0.0.2")
		r.add("gone", "10.0.0.3")
		r.restart()
		r.must(r.Repair(t.Context()))
		r.kernelHolds("10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1")
		r.differs()

		r.add("p1", "10.0.0.1") // the API shows one address of two
		r.add("new", "10.0.0.2")
		r.remove("new") // its address is p2's, who has not been added again
		r.differs()
		r.must(r.Repair(t.Context()))
		r.kernelHolds("10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1")

		r.add("p1", "fd00::1")
		r.add("p2", "10.0.0.2")
		r.settle()
		r.holds("10.0.0.1", "10.0.0.2", "fd00::1")
	})
}

// TestRestartAfterFlush: what is missing is noticed and restored before all pods are
// known, too.
func TestRestartAfterFlush(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.add("p1", "10.0.0.1")
		r.must(b.DelEntries(t.Context(), r.host.Runner(), r.opts, entries(t, "10.0.0.1")[0]))
		r.differs("10.0.0.1")
		r.must(r.Repair(t.Context()))
		r.holds("10.0.0.1")
		r.must(b.RemoveHost(t.Context(), r.host.Runner()))
		r.differsSomehow()
		r.must(r.Repair(t.Context()))
		r.holds("10.0.0.1")
	})
}

// TestTogether: a new agent's pods are written in one go, without those that could not
// be taken up; what the kernel refuses is found later.
func TestTogether(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		added := 0
		r.kernel.before = func(op string, _ redirection.HostEntry) error {
			if op == "add" {
				added++
			}
			return nil
		}
		r.must(r.Together(t.Context(), func() {
			r.add("p1", "10.0.0.1", "fd00::1")
			r.add("p2", "10.0.0.2")
			r.add("failed", "10.0.0.3")
			r.remove("failed")
			r.add("p2", "10.0.0.4")
			if added != 0 {
				t.Errorf("%d entries were written before the end", added)
			}
			r.kernelHolds()
		}))
		if added != 4 {
			t.Errorf("%d entries were written in the end, want 4", added)
		}
		r.settle()
		r.holds("10.0.0.1", "10.0.0.2", "10.0.0.4", "fd00::1")
		r.add("p3", "10.0.0.5")
		r.holds("10.0.0.1", "10.0.0.2", "10.0.0.4", "10.0.0.5", "fd00::1")

		r.kernel.before = func(string, redirection.HostEntry) error { return errKernel }
		if err := r.Together(t.Context(), func() { r.add("p4", "10.0.0.6") }); !errors.Is(err, errKernel) {
			t.Errorf("the kernel refused, and the error is %v", err)
		}
		r.kernel.before = nil
		r.differs("10.0.0.6")
		r.must(r.Repair(t.Context()))
		r.holds("10.0.0.1", "10.0.0.2", "10.0.0.4", "10.0.0.5", "10.0.0.6", "fd00::1")

		ctx, cancel := context.WithCancel(t.Context())
		if err := r.Together(ctx, cancel); err != nil {
			t.Errorf("nothing to write, and the error is %v", err)
		}
		if err := r.Together(ctx, func() {}); !errors.Is(err, context.Canceled) {
			t.Errorf("after the deadline: %v", err)
		}
		r.add("p5", "10.0.0.7")
		r.holds("10.0.0.1", "10.0.0.2", "10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.0.7", "fd00::1")
	})
}

// TestUnknownAddresses: while an enrolled pod's addresses are not known, any entry may
// be its own.
func TestUnknownAddresses(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.settle()
		r.add("p1", "10.0.0.1")
		r.restart()
		r.add("p1")
		r.add("p2", "10.0.0.2")
		r.settle()
		r.remove("p2")
		r.must(r.Repair(t.Context()))
		r.kernelHolds("10.0.0.1", "10.0.0.2")
		r.differs()
		r.add("p1", "10.0.0.1")
		r.differs("10.0.0.2")
		r.must(r.Repair(t.Context()))
		r.holds("10.0.0.1")
	})
}

// TestFaults: each kind of damage is seen, repaired, and not seen again.
func TestFaults(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.settle()
		r.add("p1", "10.0.0.1", "fd00::1")
		r.add("p2", "10.0.0.2")
		ctx, run := t.Context(), r.host.Runner()
		other := r.opts
		other.ProbeSourceIPv4 = netip.MustParseAddr("169.254.7.1")
		for _, fault := range []struct {
			name   string
			damage func() error
			want   []string
		}{
			{"none", func() error { return nil }, []string{}},
			{"an entry is missing", func() error { return b.DelEntries(ctx, run, r.opts, entries(t, "10.0.0.2")[0]) }, []string{"10.0.0.2"}},
			{"an entry too much", func() error { return b.AddEntries(ctx, run, r.opts, entries(t, "10.0.0.9")[0]) }, []string{"10.0.0.9"}},
			{"the sets are empty", func() error { return b.SetEntries(ctx, run, r.opts, nil) }, []string{"10.0.0.1", "10.0.0.2", "fd00::1"}},
			{"another source", func() error { return b.EnsureHost(ctx, run, other) }, nil},
			{"no rule and no sets", func() error { return b.RemoveHost(ctx, run) }, nil},
		} {
			r.must(fault.damage())
			if fault.want != nil {
				r.differs(fault.want...)
			} else {
				r.differsSomehow()
			}
			r.must(r.Repair(ctx))
			r.holds("10.0.0.1", "10.0.0.2", "fd00::1")
		}
	})
}

// TestVerifyWritesNothing: neither does settling where there is nothing to settle.
func TestVerifyWritesNothing(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.settle()
		r.add("p1", "10.0.0.1")
		r.kernel.before = func(op string, e redirection.HostEntry) error {
			t.Errorf("%s %s", op, e)
			return nil
		}
		r.holds("10.0.0.1")
		r.settle()
		r.add("p1", "10.0.0.1")
		r.add("p2", "10.0.0.1")
		r.remove("p1")
	})
}

// TestRest takes the rule away only where that is sure to harm nobody.
func TestRest(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.must(r.Repair(t.Context()))
		r.must(r.Rest(t.Context())) // an earlier agent's pods may not all be known
		r.holds()
		r.settle()
		r.add("p1", "10.0.0.1")
		r.must(r.Rest(t.Context()))
		r.holds("10.0.0.1")
		r.remove("p1")
		r.holds()
		r.must(r.Rest(t.Context()))
		r.gone()
		r.differs()                   // and that is as it should be
		r.must(r.Repair(t.Context())) // of what was found before
		r.gone()
		r.must(r.Rest(t.Context()))
		r.gone()
		r.add("p2", "10.0.0.2")
		r.holds("10.0.0.2")
	})
}

// TestWithoutPods: a Set that has no pod makes the rule when that is sure, and takes out the entries, or all, of an earlier one.
func TestWithoutPods(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.gone() // a Set that nobody used
		r.differs()
		r.settle()
		r.holds()
		r.add("gone", "10.0.0.1")
		r.restart()
		r.must(r.Rest(t.Context())) // the pod may be there
		r.kernelHolds("10.0.0.1")
		r.settle()
		r.holds()
		r.add("gone", "10.0.0.1")
		r.restart()
		r.must(r.AllAdded(t.Context()))
		r.kernelHolds("10.0.0.1")
		r.must(r.Rest(t.Context()))
		r.gone()
		r.settle() // late: the rule rests until the next pod
		r.gone()
		r.add("p1", "10.0.0.2")
		r.holds("10.0.0.2")
	})
}

// TestRefusedRest: a pod that comes meanwhile has its rule, and no entry of before.
func TestRefusedRest(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.add("gone", "10.0.0.1")
		r.restart()
		r.kernel.before = func(string, redirection.HostEntry) error { return errKernel }
		if err := r.Settle(t.Context()); !errors.Is(err, errKernel) {
			t.Errorf("Settle returned %v", err)
		}
		r.kernel.before = nil
		r.differs("10.0.0.1")
		r.add("p1", "10.0.0.2")
		r.differs("10.0.0.1")
		r.must(r.Repair(t.Context()))
		r.holds("10.0.0.2")
	})
}

// TestEmptySet: what is in a set that is meant to be empty is a difference.
func TestEmptySet(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.settle()
		r.add("p1", "10.0.0.1")
		r.remove("p1")
		r.must(b.AddEntries(t.Context(), r.host.Runner(), r.opts, entries(t, "10.9.9.9")...))
		r.differs("10.9.9.9")
		r.must(r.Repair(t.Context()))
		r.holds()
	})
}

// TestRefusedAdd: when the kernel takes a part only, it is left without any, and the
// pod owns nothing. If even that fails, the difference is seen and repaired.
func TestRefusedAdd(t *testing.T) {
	second := entries(t, "fd00::1")[0]
	refuse := func(ops ...string) func(string, redirection.HostEntry) error {
		return func(op string, e redirection.HostEntry) error {
			if e == second && slices.Contains(ops, op) || slices.Contains(ops, op+" all") {
				return errKernel
			}
			return nil
		}
	}
	eachBackend(t, func(t *testing.T, b backend) {
		for _, test := range []struct {
			name          string
			before, after func(string, redirection.HostEntry) error
			differences   []string
		}{
			{"before it happened", refuse("add"), nil, nil},
			{"after it happened", nil, refuse("add"), nil},
			{"and the undoing too", refuse("del all"), refuse("add"), []string{"10.0.0.1", "fd00::1"}},
		} {
			t.Run(test.name, func(t *testing.T) {
				r := newRig(t, b)
				r.settle()
				r.add("p2", "10.0.0.2")
				r.kernel.before, r.kernel.after = test.before, test.after
				addrs, _ := parse(t, "10.0.0.1", "10.0.0.2", "fd00::1")
				if err := r.Add(t.Context(), "p1", addrs, nil); !errors.Is(err, errKernel) {
					t.Errorf("Add returned %v", err)
				}
				r.kernel.before, r.kernel.after = nil, nil
				r.differs(test.differences...)
				r.must(r.Repair(t.Context()))
				r.holds("10.0.0.2")
				r.remove("p1")
				r.holds("10.0.0.2")
				r.add("p1", "10.0.0.1", "10.0.0.2", "fd00::1")
				r.holds("10.0.0.1", "10.0.0.2", "fd00::1")
			})
		}
	})
}

// TestRefusedAddAfterRestart: the entry may be that of a running pod, so it stays.
func TestRefusedAddAfterRestart(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.settle()
		r.add("p1", "10.0.0.1")
		r.restart()
		r.kernel.after = func(string, redirection.HostEntry) error { return errKernel }
		addrs, _ := parse(t, "10.0.0.1")
		if err := r.Add(t.Context(), "p1", addrs, nil); !errors.Is(err, errKernel) {
			t.Errorf("Add returned %v", err)
		}
		r.kernelHolds("10.0.0.1")
	})
}

// TestRefusedRemove: the pod is forgotten, the others are taken out, and what is left
// is seen and repaired.
func TestRefusedRemove(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.settle()
		r.add("p1", "10.0.0.1", "10.0.0.3")
		r.kernel.before = func(op string, e redirection.HostEntry) error {
			if op == "del" && e == entries(t, "10.0.0.1")[0] {
				return errKernel
			}
			return nil
		}
		if err := r.Remove(t.Context(), "p1"); !errors.Is(err, errKernel) {
			t.Errorf("Remove returned %v", err)
		}
		r.kernel.before = nil
		r.differs("10.0.0.1")
		r.must(r.Repair(t.Context()))
		r.holds()
	})
}

// TestLostTable: somebody has flushed the host's rules. An Add fails, and says so,
// until they are repaired.
func TestLostTable(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.settle()
		r.add("p0", "10.0.0.9")
		r.must(b.RemoveHost(t.Context(), r.host.Runner()))
		addrs, _ := parse(t, "10.0.0.1")
		wantError(t, "Add", r.Add(t.Context(), "p1", addrs, nil), "10.0.0.1")
		r.must(r.Repair(t.Context()))
		r.holds("10.0.0.9")
		r.add("p1", "10.0.0.1")
		r.holds("10.0.0.1", "10.0.0.9")
	})
}

// TestNoHost: errors of the runner come out, whatever was to be done.
func TestNoHost(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		broken := true
		set, err := hostprobe.New(hostprobe.Config{
			Kernel: r.kernel, Options: r.opts,
			Run: func(fn func() error) error {
				if broken {
					return errKernel
				}
				return r.host.Runner()(fn)
			},
		})
		r.must(err)
		r.Set = set
		addrs, _ := parse(t, "10.0.0.1")
		ctx := t.Context()
		for name, err := range map[string]error{
			"Add": r.Add(ctx, "p1", addrs, nil), "Repair": r.Repair(ctx), "Settle": r.Settle(ctx), "Rest": r.Rest(ctx),
		} {
			if !errors.Is(err, errKernel) {
				t.Errorf("%s returned %v", name, err)
			}
		}
		broken = false
		r.gone()
		r.add("p1", "10.0.0.1")
		r.holds("10.0.0.1")
		broken = true
		if _, err := r.Verify(ctx); !errors.Is(err, errKernel) {
			t.Errorf("Verify returned %v", err)
		}
		for name, err := range map[string]error{"Remove": r.Remove(ctx, "p1"), "Rest": r.Rest(ctx)} {
			if !errors.Is(err, errKernel) {
				t.Errorf("%s returned %v", name, err)
			}
		}
		broken = false
		r.differs("10.0.0.1")
		r.must(r.Repair(ctx))
		r.gone()
	})
}

// TestContextEnds: whoever has no time left changes nothing, neither while another
// operation is at work.
func TestContextEnds(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.settle()
		r.add("p1", "10.0.0.1")
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		r.refuse(ended)

		entered, leave := make(chan struct{}), make(chan struct{})
		r.kernel.before = func(string, redirection.HostEntry) error {
			close(entered)
			<-leave
			return nil
		}
		added := make(chan error)
		go func() {
			addrs, _ := parse(t, "10.0.0.2")
			added <- r.Add(t.Context(), "p2", addrs, nil)
		}()
		<-entered
		waiting, cancel := context.WithCancel(t.Context())
		refused := make(chan struct{})
		go func() {
			defer close(refused)
			r.refuse(waiting)
		}()
		cancel()
		<-refused
		close(leave)
		r.must(<-added)
		r.kernel.before = nil
		r.holds("10.0.0.1", "10.0.0.2")
	})
}

// refuse fails the test unless every operation ends with the error of ctx.
func (r *rig) refuse(ctx context.Context) {
	addrs, _ := parse(r.t, "10.0.0.9")
	_, verifyErr := r.Verify(ctx)
	for name, err := range map[string]error{
		"Add": r.Add(ctx, "p1", addrs, nil), "Remove": r.Remove(ctx, "p1"), "Verify": verifyErr,
		"Repair": r.Repair(ctx), "Settle": r.Settle(ctx), "Rest": r.Rest(ctx),
	} {
		if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "probe entries") {
			r.t.Errorf("%s returned %v", name, err)
		}
	}
}

// TestUndoneInTime: an Add whose caller is out of time in the middle takes back what it
// did all the same.
func TestUndoneInTime(t *testing.T) {
	eachBackend(t, func(t *testing.T, b backend) {
		r := newRig(t, b)
		r.settle()
		ctx, cancel := context.WithCancel(t.Context())
		r.kernel.after = func(op string, _ redirection.HostEntry) error {
			cancel()
			if op == "add" {
				return ctx.Err()
			}
			return nil
		}
		addrs, _ := parse(t, "10.0.0.1", "10.0.0.2")
		if err := r.Add(ctx, "p1", addrs, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("Add returned %v", err)
		}
		r.holds()
	})
}

func wantError(t *testing.T, what string, err error, part string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), part) {
		t.Errorf("%s: got %v, want an error with %q", what, err, part)
	}
}
