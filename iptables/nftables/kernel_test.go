// SPDX-License-Identifier: Apache-2.0

package nftables_test

import (
	"encoding/binary"
	"errors"
	"flag"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

// tableFlagOwner is NFT_TABLE_F_OWNER of linux/netfilter/nf_tables.h (since 5.12): the table belongs to the socket that
// added it, nobody else can change it, and it goes with the socket.
const tableFlagOwner = 2

// tableSocket opens an nfnetlink socket in the pod's namespace. Closing it waits for what the kernel does then.
func tableSocket(t *testing.T, p *pod) (fd int) {
	t.Helper()
	p.Do(t, func() (err error) {
		fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		return err
	})
	return fd
}

// sendTable adds a table of our name with flags, or changes those of the one that is there.
func sendTable(t *testing.T, fd int, flags uint32) {
	t.Helper()
	batchHeader := binary.BigEndian.AppendUint16([]byte{unix.AF_UNSPEC, unix.NFNETLINK_V0}, unix.NFNL_SUBSYS_NFTABLES)
	table := rawnetlink.AppendAttribute([]byte{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0},
		rawnetlink.Attribute{Type: unix.NFTA_TABLE_NAME, Data: []byte(redirection.NFTablesTable + "\x00")})
	table = rawnetlink.AppendAttribute(table,
		rawnetlink.Attribute{Type: unix.NFTA_TABLE_FLAGS, Data: binary.BigEndian.AppendUint32(nil, flags)})
	var batch []byte
	for _, m := range []rawnetlink.Message{
		{Type: unix.NFNL_MSG_BATCH_BEGIN, Flags: unix.NLM_F_REQUEST, Payload: batchHeader},
		{
			Type:  unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWTABLE,
			Flags: unix.NLM_F_REQUEST | unix.NLM_F_CREATE | unix.NLM_F_ACK, Payload: table,
		},
		{Type: unix.NFNL_MSG_BATCH_END, Flags: unix.NLM_F_REQUEST, Payload: batchHeader},
	} {
		batch = rawnetlink.AppendMessage(batch, m)
	}
	if _, err := unix.Write(fd, batch); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 4096)
	n, err := unix.Read(fd, answer)
	if err != nil {
		t.Fatal(err)
	}
	m, _, err := rawnetlink.Next(answer[:n])
	if err := errors.Join(err, m.Failure()); err != nil {
		t.Fatalf("table with flags %#x: %v", flags, err)
	}
}

func closeSocket(t *testing.T, fd int) {
	t.Helper()
	if err := unix.Close(fd); err != nil {
		t.Error(err)
	}
}

// TestListRulesetGolden shows what an operator sees.
func TestListRulesetGolden(t *testing.T) {
	netnstest.Require(t)
	backend := newBackend(t)
	for name, change := range map[string]func(*redirection.Options){
		"default": func(*redirection.Options) {},
		"ipv4":    func(o *redirection.Options) { o.IPv6 = false },
		"reroute": func(o *redirection.Options) {
			o.RerouteInterfaces, o.InboundBypass = []string{"tap0", "k6t-net0"}, true
		},
		"everything": func(o *redirection.Options) {
			o.KeepEstablished, o.RerouteInterfaces, o.ExcludeInterfaces = true, []string{"tap0"}, []string{"net1"}
			o.ExcludeInboundPorts = []redirection.PortRange{{First: 22, Last: 22}, {First: 8000, Last: 8010}}
			o.ExcludeOutboundPorts = []redirection.PortRange{{First: 5432, Last: 5432}}
			o.ExcludeOutboundCIDRs = []netip.Prefix{netip.MustParsePrefix("8.8.0.0/15"), netip.MustParsePrefix("2001:db8::/32")}
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPod(t, backend)
			opts := redirection.DefaultOptions()
			change(&opts)
			p.apply(opts)
			listingGolden(t, p, name+".nft")
		})
	}
}

// listingGolden compares what nft lists in the namespace with a golden file.
func listingGolden(t *testing.T, p *pod, file string) {
	t.Helper()
	const written = "v1.0." // the notation is that of the tool's version
	version, err := exec.CommandContext(t.Context(), "nft", "--version").Output()
	if err != nil || !strings.Contains(string(version), written) {
		t.Skipf("needs nft %sx, as in Debian 12: %s %v", written, version, err)
	}
	var listing []byte
	p.Do(t, func() (err error) {
		listing, err = exec.CommandContext(t.Context(), "nft", "list", "ruleset").Output()
		return err
	})
	path := filepath.Join("testdata", file)
	if flag.Lookup("update").Value.String() == "true" {
		if err := os.WriteFile(path, listing, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(listing)); diff != "" {
		t.Errorf("nft list ruleset (-golden +kernel):\n%s", diff)
	}
}

// TestDescriptorsStayFlat goes through many pods' lives with one backend.
func TestDescriptorsStayFlat(t *testing.T) {
	rounds := 2000
	if testing.Short() {
		rounds = 200
	}
	backend := newBackend(t)
	pods := make([]*pod, 20)
	for i := range pods {
		pods[i] = newPod(t, backend)
	}
	opts := redirection.DefaultOptions()
	settled := descriptors(t)
	for i := range rounds {
		p := pods[i%len(pods)]
		p.apply(opts)
		p.verify(opts)
		p.remove()
		if now := descriptors(t); now > settled+100 {
			t.Fatalf("%d descriptors after %d rounds, %d before", now, i, settled)
		}
	}
	for deadline := time.Now().Add(30 * time.Second); descriptors(t) > settled; runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("%d descriptors in the end, %d before", descriptors(t), settled)
		}
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
