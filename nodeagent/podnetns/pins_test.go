// SPDX-License-Identifier: Apache-2.0

package podnetns_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"ambientd/nodeagent/podnetns"
	"ambientd/tools/netnstest"
)

func TestPinsRefuseASecondPod(t *testing.T) {
	host := openHost(t)
	shared := netnstest.New(t)
	pins := podnetns.NewPins()
	first, second := adopt(t, host, shared), adopt(t, host, shared)
	if err := pins.Pin("uid-1", first); err != nil {
		t.Fatal(err)
	}
	err := pins.Pin("uid-2", second)
	taken, ok := errors.AsType[*podnetns.TakenError](err)
	if !ok || taken.OtherUID != "uid-1" || taken.Key != first.Key() || !strings.Contains(err.Error(), "uid-1") {
		t.Fatalf("got %v, want a TakenError that names uid-1", err)
	}
	if _, ok := pins.Get("uid-2"); ok {
		t.Error("the refused pod has a pin")
	}
	if err := second.Do(func() error { return nil }); err != nil {
		t.Errorf("the refused netns is no longer the caller's: %v", err)
	}
	// Free again once the first pod is gone.
	if err := pins.Unpin("uid-1"); err != nil {
		t.Fatal(err)
	}
	if err := pins.Pin("uid-2", second); err != nil {
		t.Errorf("after the first pod is gone: %v", err)
	}
}

// The runtime may make a new sandbox for the same pod.
func TestPinsReplaceOnesOwn(t *testing.T) {
	host := openHost(t)
	pins := podnetns.NewPins()
	older, newer := adopt(t, host, netnstest.New(t)), adopt(t, host, netnstest.New(t))
	for _, n := range []*podnetns.Netns{older, newer} {
		if err := pins.Pin("uid", n); err != nil {
			t.Fatal(err)
		}
	}
	if got, ok := pins.Get("uid"); !ok || got != newer {
		t.Errorf("Get returns %v, %v; want the newer netns", got, ok)
	}
	if uid, ok := pins.ByKey(older.Key()); ok {
		t.Errorf("the older netns still belongs to %s", uid)
	}
	if uid, ok := pins.ByKey(newer.Key()); !ok || uid != "uid" {
		t.Errorf("the newer netns belongs to %q, %v; want uid", uid, ok)
	}
	if err := older.Do(func() error { return nil }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("the older netns is still open: %v", err)
	}
}

func TestPinsSameAgain(t *testing.T) {
	host := openHost(t)
	pod := netnstest.New(t)
	pins := podnetns.NewPins()
	first := adopt(t, host, pod)
	for range 2 { // the very same
		if err := pins.Pin("uid", first); err != nil {
			t.Fatal(err)
		}
	}
	second := adopt(t, host, pod) // another descriptor of the same netns
	if err := pins.Pin("uid", second); err != nil {
		t.Fatal(err)
	}
	if got, _ := pins.Get("uid"); got != second {
		t.Error("the newer descriptor is not the one in use")
	}
	if uid, ok := pins.ByKey(second.Key()); !ok || uid != "uid" {
		t.Errorf("the netns belongs to %q, %v; want uid", uid, ok)
	}
	if err := second.Do(func() error { return nil }); err != nil {
		t.Error(err)
	}
}

func TestUnpin(t *testing.T) {
	host := openHost(t)
	pins := podnetns.NewPins()
	n := adopt(t, host, netnstest.New(t))
	if err := pins.Pin("uid", n); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := pins.Unpin("uid"); err != nil {
			t.Fatal(err)
		}
	}
	if _, ok := pins.Get("uid"); ok {
		t.Error("still found by UID")
	}
	if _, ok := pins.ByKey(n.Key()); ok {
		t.Error("still found by key")
	}
	if err := n.Do(func() error { return nil }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("still open: %v", err)
	}
}
