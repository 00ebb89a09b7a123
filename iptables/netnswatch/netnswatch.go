// SPDX-License-Identifier: Apache-2.0

// Package netnswatch tells when packet rules, policy rules, routes or the loopback device of network namespaces change,
// so that damage is looked at when it happens and not when the next audit comes round. It owns the subscription to the
// kernel's notifications, and the regular question for the number of the last transaction on packet rules. It refuses to say
// what changed, or who changed it: an event is a reason to verify.
//
// # Policy rules, routes, loopback: notifications
//
// One socket in the namespace where [New] is called hears all namespaces that have a number in it (NETLINK_LISTEN_ALL_NSID,
// since 4.2): [Watcher.Watch] has the kernel give one, and the kernel says with each notification whose it is. The number
// goes with the namespace. A filter in the kernel drops what nobody here needs before it is queued.
//
// # Packet rules: a question
//
// nf_tables notifies too, and it is dear: while anybody listens, in whichever namespace, the kernel writes up every object of
// every transaction in all of them. That made a transaction that installs redirection take 1.9 times as long and one that
// removes it 4 times, made those of everybody else on the node dearer too, and a pod that changes its rules all the time
// could keep a third of a core busy. To ask a namespace which transaction was its last takes 3 µs on a socket that is open
// there anyway (rawnetlink.Keeper): every 0.4 s that is half a percent of a core for 250 pods, whatever they do.
package netnswatch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"ambientd/iptables/nftables"
	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// ID names a watched network namespace: its number in the namespace of the watcher. The kernel gives the number of a
// namespace that is gone to another one, so what it stood for ends with [Watcher.Unwatch].
type ID int32

// IDs that are no namespace's number.
const (
	// Own is the namespace that the watcher is in.
	Own ID = -1
	// All means that any of the watched namespaces may have changed: there were more notifications than the kernel keeps.
	All ID = -2
)

// Netns is a network namespace to watch. Its owner holds it, until watching ends.
type Netns interface {
	redirection.Netns
	// File is a descriptor of it.
	File() *os.File
}

// Rules says which transaction on a namespace's packet rules was the last. [*nftables.Backend] does.
type Rules interface {
	Generation(ctx context.Context, ns redirection.Netns) (uint64, error)
}

// Watcher hears what changes. Its methods may be used concurrently.
type Watcher struct {
	rules  Rules
	route  *os.File
	own    fileID
	events chan ID
	wake   chan struct{} // holds one element while something is pending

	mu      sync.Mutex
	numbers *rawnetlink.Socket // in the watcher's namespace
	watched map[ID]*watched
	pending []ID // what changed and was not delivered yet, each once
}

// fileID tells namespaces apart while they are there.
type fileID struct{ device, inode uint64 }

// New returns a watcher in the calling thread's network namespace, which is to be the host's. It needs CAP_NET_ADMIN
// there, and CAP_NET_BROADCAST in the user namespaces that own the namespaces to watch. What changes between New and
// Run is not lost.
func New() (w *Watcher, err error) {
	w = &Watcher{events: make(chan ID), wake: make(chan struct{}, 1), watched: map[ID]*watched{}}
	if w.rules, err = nftables.New(); err != nil {
		return nil, err
	}
	var here unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &here); err != nil {
		return nil, fmt.Errorf("looking at the own network namespace: %w", err)
	}
	w.own = fileID{device: here.Dev, inode: here.Ino}
	w.route, err = subscribe(routeFilter(), unix.RTNLGRP_LINK,
		unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE)
	if err != nil {
		return nil, err
	}
	opened, err := rawnetlink.New().Open(redirection.Runner(func(fn func() error) error { return fn() }), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, errors.Join(err, w.route.Close())
	}
	w.numbers = opened[0]
	return w, nil
}

// Run delivers events until the context ends, and closes the watcher. It returns an error only if the kernel refuses to
// go on.
func (w *Watcher) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return w.receive(ctx) })
	group.Go(func() error { w.look(ctx); return nil })
	group.Go(func() error { w.deliver(ctx); return nil })
	<-ctx.Done()
	// Closing the file wakes its reader.
	closeErr := errors.Join(w.route.Close(), w.closeNumbers())
	return errors.Join(group.Wait(), closeErr)
}

// Events delivers the ID of each watched namespace in which something changed, once for any number of changes since it
// was delivered last. Nothing is closed when Run ends.
func (w *Watcher) Events() <-chan ID { return w.events }

// Watch begins to watch a network namespace: what changes after Watch has returned makes an event. Watching one again
// returns the same ID.
func (w *Watcher) Watch(ctx context.Context, ns Netns) (ID, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	id, err := w.identify(ns.File())
	if err != nil {
		return 0, fmt.Errorf("watching a network namespace: %w", err)
	}
	generation, err := w.rules.Generation(ctx, ns)
	if err != nil {
		return 0, fmt.Errorf("watching a network namespace: %w", err)
	}
	if known := w.watched[id]; known != nil {
		generation = known.generation // what changed since then is still to be told
	}
	w.watched[id] = &watched{id: id, ns: ns, generation: generation}
	return id, nil
}

// Unwatch ends watching: an event that was on its way is dropped, unless it is being delivered right then.
func (w *Watcher) Unwatch(id ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.watched, id)
	w.pending = slices.DeleteFunc(w.pending, func(pending ID) bool { return pending == id })
}

// changed notes a change in one namespace, or in All.
func (w *Watcher) changed(id ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.note(id)
}

// note is changed with mu held.
func (w *Watcher) note(id ID) {
	switch {
	case id == All:
		w.pending = append(w.pending[:0], All) // it says all that others say
	case w.watched[id] == nil, slices.Contains(w.pending, id), slices.Contains(w.pending, All):
		return
	default:
		w.pending = append(w.pending, id)
	}
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// next takes one pending event, if there is any.
func (w *Watcher) next() (ID, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.pending) == 0 {
		return 0, false
	}
	id := w.pending[0]
	w.pending = w.pending[:copy(w.pending, w.pending[1:])]
	return id, true
}

// deliver sends pending events, oldest first. While a receiver is slow they pile up, each watched namespace once.
func (w *Watcher) deliver(ctx context.Context) {
	for {
		id, ok := w.next()
		if !ok {
			select {
			case <-w.wake:
				continue
			case <-ctx.Done():
				return
			}
		}
		select {
		case w.events <- id:
		case <-ctx.Done():
			return
		}
	}
}

func (w *Watcher) closeNumbers() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	numbers := w.numbers
	w.numbers = nil
	return numbers.Close()
}
