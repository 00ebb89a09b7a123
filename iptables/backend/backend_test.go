// SPDX-License-Identifier: Apache-2.0

package backend_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"testing"

	google "github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"ambientd/iptables/backend"
	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

// scratches hands out namespaces and remembers them.
type scratches struct {
	t        *testing.T
	given    []*netnstest.NS
	released int
	prepare  func(ns *netnstest.NS)             // may be nil
	wrap     func(fn func() error) func() error // may be nil; what runs inside
}

func (s *scratches) make() (redirection.Runner, func() error, error) {
	ns := netnstest.New(s.t)
	s.given = append(s.given, ns)
	if s.prepare != nil {
		s.prepare(ns)
	}
	run := ns.Runner()
	if s.wrap != nil {
		inner := run
		run = func(fn func() error) error { return inner(s.wrap(fn)) }
	}
	return run, func() error { s.released++; return nil }, nil
}

// checkLeft fails the test unless every namespace was released and holds nothing of ours.
func (s *scratches) checkLeft() {
	s.t.Helper()
	if s.released != len(s.given) {
		s.t.Errorf("%d namespaces made, %d released", len(s.given), s.released)
	}
	for _, ns := range s.given {
		ns.Do(s.t, func() error {
			conn, err := google.New()
			if err != nil {
				return err
			}
			chains, err := conn.ListChains()
			if err != nil {
				return err
			}
			for _, chain := range chains {
				if chain.Table.Name == redirection.NFTablesTable && chain.Table.Family == google.TableFamilyINet ||
					chain.Name == redirection.IPTablesPrerouting || chain.Name == redirection.IPTablesOutput {
					s.t.Errorf("chain %s of table %s is left", chain.Name, chain.Table.Name)
				}
			}
			rules, err := netlink.RuleList(netlink.FAMILY_ALL)
			if err != nil {
				return err
			}
			for _, rule := range rules {
				if rule.Priority == int(redirection.RulePriority) {
					s.t.Errorf("policy rule %s is left", rule)
				}
			}
			return nil
		})
	}
}

func logTo(buffer *bytes.Buffer) *slog.Logger { return slog.New(slog.NewTextHandler(buffer, nil)) }

// occupied has the table's name taken by another process, so that nftables fails and iptables does not. The socket that
// owns the table closes with the test.
func occupied(t *testing.T) func(ns *netnstest.NS) {
	const tableFlagOwner = 2 // NFT_TABLE_F_OWNER, since 5.12
	return func(ns *netnstest.NS) {
		sockets, err := rawnetlink.New().Open(ns.Runner(), unix.NETLINK_NETFILTER)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := sockets[0].Close(); err != nil {
				t.Error(err)
			}
		})
		subsystem := binary.BigEndian.AppendUint16([]byte{unix.AF_UNSPEC, 0}, unix.NFNL_SUBSYS_NFTABLES)
		table := rawnetlink.AppendAttribute([]byte{unix.NFPROTO_INET, 0, 0, 0},
			rawnetlink.Attribute{Type: unix.NFTA_TABLE_NAME, Data: []byte(redirection.NFTablesTable + "\x00")})
		table = rawnetlink.AppendAttribute(table,
			rawnetlink.Attribute{Type: unix.NFTA_TABLE_FLAGS, Data: binary.BigEndian.AppendUint32(nil, tableFlagOwner)})
		var batch []byte
		for _, m := range []rawnetlink.Message{
			{Type: unix.NFNL_MSG_BATCH_BEGIN, Flags: unix.NLM_F_REQUEST, Payload: subsystem},
			{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWTABLE, Flags: unix.NLM_F_REQUEST | unix.NLM_F_CREATE | unix.NLM_F_ACK, Sequence: 1, Payload: table},
			{Type: unix.NFNL_MSG_BATCH_END, Flags: unix.NLM_F_REQUEST, Sequence: 2, Payload: subsystem},
		} {
			batch = rawnetlink.AppendMessage(batch, m)
		}
		if refused, err := sockets[0].Execute(batch, 1); err != nil || len(refused) > 0 {
			t.Fatalf("taking the table's name: %v %v", refused, err)
		}
	}
}

// withoutNetAdmin runs fn on a thread that lacks CAP_NET_ADMIN, which is what an agent without privileges is like. The
// sockets that it opens never get it back.
func withoutNetAdmin(fn func() error) func() error {
	return func() (err error) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var before [2]unix.CapUserData
		if err := unix.Capget(&header, &before[0]); err != nil {
			return err
		}
		without := before
		without[0].Effective &^= 1 << unix.CAP_NET_ADMIN
		if err := unix.Capset(&header, &without[0]); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, unix.Capset(&header, &before[0])) }()
		return fn()
	}
}

func TestModes(t *testing.T) {
	for _, test := range []struct{ mode, wantName, wantReason string }{
		{backend.Auto, backend.NFTables, "the kernel took, showed and removed every kind of rule over netlink, for ipv4,ipv6"},
		{backend.NFTables, backend.NFTables, "asked for by configuration; the kernel took, showed and removed every kind of rule over netlink, for ipv4,ipv6"},
		{backend.IPTables, backend.IPTables, "asked for by configuration; the iptables programs (variant "},
	} {
		t.Run(test.mode, func(t *testing.T) {
			netnstest.Require(t)
			s := &scratches{t: t}
			var log bytes.Buffer
			chosen, err := backend.Choose(t.Context(), test.mode, s.make, logTo(&log))
			if err != nil {
				t.Fatal(err)
			}
			if chosen.Name != test.wantName || !strings.HasPrefix(chosen.Reason, test.wantReason) {
				t.Errorf("chose %s: %s", chosen.Name, chosen.Reason)
			}
			if log.Len() > 0 {
				t.Errorf("nothing went wrong, but it logged: %s", &log)
			}
			s.checkLeft()
			live(t, chosen.Backend)
		})
	}
}

// live puts a chosen backend to use.
func live(t *testing.T, b backend.Backend) {
	t.Helper()
	run := netnstest.New(t).Runner()
	opts := redirection.DefaultOptions()
	if families, err := b.Apply(t.Context(), run, opts); err != nil || families != redirection.DualStack {
		t.Errorf("apply: %s, %v", families, err)
	}
	if _, differences, err := b.Verify(t.Context(), run, opts); err != nil || len(differences) > 0 {
		t.Errorf("verify: %v, %v", differences, err)
	}
	if err := b.Remove(t.Context(), run); err != nil {
		t.Errorf("remove: %v", err)
	}
}

func TestAutoFallsBack(t *testing.T) {
	netnstest.Require(t)
	s := &scratches{t: t, prepare: occupied(t)}
	var log bytes.Buffer
	chosen, err := backend.Choose(t.Context(), backend.Auto, s.make, logTo(&log))
	if err != nil {
		t.Fatal(err)
	}
	if chosen.Name != backend.IPTables {
		t.Errorf("chose %s", chosen.Name)
	}
	for _, want := range []string{"nftables does not work here (", "adding table inet ambientd: operation not permitted", "; the iptables programs (variant "} {
		if !strings.Contains(chosen.Reason, want) {
			t.Errorf("reason %q lacks %q", chosen.Reason, want)
		}
	}
	if !strings.Contains(log.String(), "step=probe") {
		t.Errorf("log: %s", &log)
	}
	live(t, chosen.Backend)
}

func TestExplicitModeThatDoesNotWork(t *testing.T) {
	netnstest.Require(t)
	s := &scratches{t: t, prepare: occupied(t)}
	_, err := backend.Choose(t.Context(), backend.NFTables, s.make, slog.Default())
	if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "redirection mode nftables does not work on this node: ") {
		t.Errorf("got %v", err)
	}
}

func TestNothingWorks(t *testing.T) {
	netnstest.Require(t)
	for _, mode := range []string{backend.Auto, backend.NFTables, backend.IPTables} {
		t.Run(mode, func(t *testing.T) {
			s := &scratches{t: t, wrap: withoutNetAdmin}
			_, err := backend.Choose(t.Context(), mode, s.make, slog.New(slog.DiscardHandler))
			if err == nil || !strings.Contains(err.Error(), "run the agent with CAP_NET_ADMIN and CAP_SYS_ADMIN") {
				t.Errorf("got %v", err)
			}
			s.checkLeft()
		})
	}
}

func TestBadInput(t *testing.T) {
	netnstest.Require(t)
	s := &scratches{t: t}
	if _, err := backend.Choose(t.Context(), "ebpf", s.make, slog.Default()); err == nil || !strings.Contains(err.Error(), `"ebpf" is none of auto, nftables, iptables`) {
		t.Errorf("unknown mode: %v", err)
	}
	full := errors.New("no more namespaces")
	none := func() (redirection.Runner, func() error, error) { return nil, nil, full }
	if _, err := backend.Choose(t.Context(), backend.Auto, none, slog.New(slog.DiscardHandler)); !errors.Is(err, full) {
		t.Errorf("no scratch namespace: %v", err)
	}
	stuck := errors.New("stuck")
	sticky := func() (redirection.Runner, func() error, error) {
		run, _, err := s.make()
		return run, func() error { return stuck }, err
	}
	if _, err := backend.Choose(t.Context(), backend.NFTables, sticky, slog.Default()); !errors.Is(err, stuck) {
		t.Errorf("a scratch namespace that cannot be released: %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := backend.Choose(ended, backend.Auto, s.make, slog.Default()); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end: %v", err)
	}
}
