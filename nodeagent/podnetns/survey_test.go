// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/tools/netnstest"
)

func openPath(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func descriptorCount(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// In one visit each file gets its own answer, whatever the others are.
func TestSurveyOfMany(t *testing.T) {
	netnstest.Require(t)
	host, err := OpenHost()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	var files []*os.File
	var want []Key
	before := descriptorCount(t)
	for range 3 {
		n, err := host.Scratch()
		if err != nil {
			t.Fatal(err)
		}
		mnt, own := openPath(t, "/proc/self/ns/mnt"), openPath(t, "/proc/self/ns/net")
		files, want = append(files, mnt, n.File(), own), append(want, n.Key())
	}
	loopback := map[netip.Addr][]*pursuit{netip.MustParseAddr("127.0.0.1"): {nil}, netip.IPv6Loopback(): {nil}}
	all := newSurveyor(host, rawnetlink.New(), loopback).survey(files...)
	for i, v := range all {
		switch i % 3 {
		case 0:
			if !errors.Is(v.err, ErrNotNetns) || v.netns != nil {
				t.Errorf("file %d: %v, %v; want %v", i, v.netns, v.err, ErrNotNetns)
			}
		case 1:
			// Its lo, which is all that a scratch netns has, is up.
			if v.err != nil || v.netns.Key() != want[i/3] || !slices.Equal(v.held, []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()}) {
				t.Errorf("file %d: netns %v with %v, %v; want %v", i, v.netns, v.held, v.err, want[i/3])
			}
			if err := v.netns.Close(); err != nil {
				t.Error(err)
			}
		case 2:
			if !errors.Is(v.err, ErrHostNetns) || v.netns != nil {
				t.Errorf("file %d: %v, %v; want %v", i, v.netns, v.err, ErrHostNetns)
			}
		}
	}
	if after := descriptorCount(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
	if none := newSurveyor(host, rawnetlink.New(), nil).survey(); len(none) != 0 {
		t.Errorf("of no file: %v", none)
	}
}

// What is no namespace at all is never entered.
func TestOpenNetnsRefuses(t *testing.T) {
	netnstest.Require(t)
	host, err := OpenHost()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	pidfd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	before := descriptorCount(t)
	for _, path := range []string{"/dev/null", "/proc/self/status", t.TempDir()} {
		if f, _, err := host.openNetns(unix.AT_FDCWD, path); f != nil || !errors.Is(err, ErrNotNetns) {
			t.Errorf("%s: got %v, %v, want %v", path, f, err, ErrNotNetns)
		}
	}
	// setns would take a pidfd. Many kernels, and many users, cannot even open it again.
	if f, _, err := host.openNetns(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", pidfd)); err == nil {
		t.Errorf("a pidfd was opened as %v", f.Name())
	}
	if after := descriptorCount(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

// A thread that cannot return from a survey is given up, and so is what it was to tell.
func TestSurveyThatCannotReturn(t *testing.T) {
	host, pod, _ := strand(t)
	file, err := duplicate(pod.File())
	if err != nil {
		t.Fatal(err)
	}
	before := descriptorCount(t)
	lost := &Host{file: pod.home, key: host.key}
	v := newSurveyor(lost, rawnetlink.New(), nil).survey(file)[0]
	if !errors.Is(v.err, unix.EINVAL) || !strings.Contains(v.err.Error(), "returning to the host's netns") || v.netns != nil {
		t.Errorf("got %v, %v", v.netns, v.err)
	}
	if after := descriptorCount(t); after != before-1 {
		t.Errorf("%d descriptors before, %d after, of which the file should be gone", before, after)
	}
}

// A process that has moved between two looks is no candidate any more, and one that has
// ended neither: the number of its netns may be another's by now.
func TestCandidateThatMoved(t *testing.T) {
	netnstest.Require(t)
	host, err := OpenHost()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	before := descriptorCount(t)
	for name, test := range map[string]struct {
		prepare func(dir string) error
		want    string
	}{
		"moved": {func(dir string) error { return os.Symlink("/proc/self/ns/net", filepath.Join(dir, "net")) }, "entered another netns"},
		"ended": {func(string) error { return nil }, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			ns := filepath.Join(dir, "ns")
			if err := errors.Join(os.Mkdir(ns, 0o755), test.prepare(ns)); err != nil {
				t.Fatal(err)
			}
			fd, err := openat(unix.AT_FDCWD, dir, unix.O_PATH|unix.O_DIRECTORY)
			if err != nil {
				t.Fatal(err)
			}
			c := candidate{pid: "17", dir: fd, group: &group{id: nsID{dev: 1, ino: 2}}}
			if f, err := c.open(host); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, %v; want an error with %q", f, err, test.want)
			}
		})
	}
	if after := descriptorCount(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

// What is kept of the addresses decides as all of them would, and for the same reason.
func TestHoldingDecides(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	address := func() netip.Addr {
		n := byte(random.IntN(12))
		of := [][]byte{{10, 0, 0, n}, {127, 0, 0, 1 + n}, netip.MustParseAddr("fd00::").AsSlice(), netip.MustParseAddr("fe80::").AsSlice()}[random.IntN(4)]
		of[len(of)-1] = n
		ip, _ := netip.AddrFromSlice(of)
		return ip
	}
	some := func(most int) []netip.Addr {
		ips := make([]netip.Addr, random.IntN(most+1))
		for i := range ips {
			ips[i] = address()
		}
		return ips
	}
	for range 20000 {
		all, pods, kept := some(20), [][]netip.Addr{some(2), some(2), some(3)}, holding{wanted: map[netip.Addr][]*pursuit{}}
		for _, ip := range slices.Concat(pods...) {
			kept.wanted[ip] = []*pursuit{nil}
		}
		for _, ip := range all {
			kept.add(ip)
		}
		if len(kept.held) > len(kept.wanted)+2 {
			t.Fatalf("of %v are kept %v", all, kept.held)
		}
		for _, wanted := range pods {
			if got, want := holds(kept.held, wanted), holds(all, wanted); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Fatalf("a pod with %v: of %v are kept %v: %v, want %v", wanted, all, kept.held, got, want)
			}
		}
	}
}

func TestAddressOfMessage(t *testing.T) {
	header := make([]byte, unix.SizeofIfAddrmsg)
	attribute := func(kind uint16, data ...byte) rawnetlink.Attribute {
		return rawnetlink.Attribute{Type: kind, Data: data}
	}
	for _, test := range []struct {
		name       string
		attributes []rawnetlink.Attribute
		want       string // empty for an error
	}{
		{"IPv4", []rawnetlink.Attribute{attribute(unix.IFA_ADDRESS, 10, 0, 0, 1)}, "10.0.0.1"},
		{"peer first", []rawnetlink.Attribute{attribute(unix.IFA_ADDRESS, 10, 0, 0, 2), attribute(unix.IFA_LOCAL, 10, 0, 0, 1)}, "10.0.0.1"},
		{"peer last", []rawnetlink.Attribute{attribute(unix.IFA_LOCAL, 10, 0, 0, 1), attribute(unix.IFA_ADDRESS, 10, 0, 0, 2)}, "10.0.0.1"},
		{"others", []rawnetlink.Attribute{attribute(unix.IFA_LABEL, 'e', 'n', 's', '5'), attribute(unix.IFA_LOCAL, 10, 0, 0, 1), attribute(unix.IFA_BROADCAST, 10, 0, 0, 255)}, "10.0.0.1"},
		{"IPv6", []rawnetlink.Attribute{attribute(unix.IFA_ADDRESS, netip.MustParseAddr("fd00::1").AsSlice()...)}, "fd00::1"},
		{"no address", nil, netip.Addr{}.String()},
		{"short address", []rawnetlink.Attribute{attribute(unix.IFA_ADDRESS, 10, 0)}, ""},
	} {
		payload := slices.Clone(header)
		for _, a := range test.attributes {
			payload = rawnetlink.AppendAttribute(payload, a)
		}
		if got, err := address(payload); (err != nil) != (test.want == "") || err == nil && got.String() != test.want {
			t.Errorf("%s: got %v, %v; want %q", test.name, got, err, test.want)
		}
	}
	for name, payload := range map[string][]byte{"too short": {1, 2}, "cut off": append(slices.Clone(header), 20, 0, unix.IFA_ADDRESS, 0, 10)} {
		if got, err := address(payload); err == nil && got.IsValid() {
			t.Errorf("%s: got %v", name, got)
		}
	}
}

// A pod's error stays readable, whatever number of netns was not its own.
func TestReasonsAreBounded(t *testing.T) {
	p := &pursuit{}
	for range 100 {
		p.note("process 17", errors.New("it is another's"))
	}
	text := p.notFound("nothing leads to it").Error()
	if strings.Count(text, "process 17") != maxReasons || !strings.HasSuffix(text, "and 96 more reasons") {
		t.Error(text)
	}
}

// What the agent ran out of is not what a pod is said to lack, nor to be.
func TestShortages(t *testing.T) {
	key := Key{BootID: "b", Cookie: 1}
	for _, errno := range []unix.Errno{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOBUFS} {
		p := &pursuit{Wanted: Wanted{UID: "u", Key: key}}
		err := p.livesIn(surveyed{key: key, err: fmt.Errorf("reading the netns' addresses: %w", errno)})
		p.note("process 16", errors.New("it is another's"))
		p.note("process 17", err)
		p.note("process 18", unix.ENOENT)
		if err := p.notFound("nothing leads to it"); !p.open() || !errors.Is(err, errno) || errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "process 17: ") {
			t.Errorf("%v: %v, %v", errno, p.err, err)
		}
	}
}
