// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/nodeagent/podnetns"
	"ambientd/tools/enclave"
)

// namespaces makes network namespaces as pods have them, entered as the agent does.
type namespaces struct {
	host *podnetns.Host
	made []*enclave.Netns
}

func newNamespaces() (*namespaces, error) {
	host, err := podnetns.OpenHost()
	if err != nil {
		return nil, err
	}
	return &namespaces{host: host}, nil
}

// one is several with a single one.
func (s *namespaces) one(ctx context.Context, fn func(*podnetns.Netns) error) error {
	return s.several(ctx, 1, func(all []*podnetns.Netns) error { return fn(all[0]) })
}

// several runs fn with n network namespaces as pods have them: lo up, no rule. They
// stay until discard: the kernel takes one apart in the background, under locks that
// the next measurement would wait for.
func (s *namespaces) several(ctx context.Context, n int, fn func([]*podnetns.Netns) error) (err error) {
	var fresh []*podnetns.Netns
	defer func() {
		for _, ns := range fresh {
			err = errors.Join(err, ns.Close())
		}
	}()
	for range n {
		made, err := enclave.MakeNetns(fmt.Sprintf("bench-%d", len(s.made)))
		if err != nil {
			return err
		}
		s.made = append(s.made, made)
		if err := made.Do(loopbackUp); err != nil {
			return err
		}
		ns, err := s.adopt(made)
		if err != nil {
			return err
		}
		fresh = append(fresh, ns)
	}
	if err := settle(ctx); err != nil {
		return err
	}
	return fn(fresh)
}

func (s *namespaces) adopt(made *enclave.Netns) (*podnetns.Netns, error) {
	f, err := os.Open(made.Path())
	if err != nil {
		return nil, fmt.Errorf("opening a network namespace: %w", err)
	}
	defer f.Close()
	return s.host.Adopt(f)
}

// settle waits until this process has no netlink socket open any more. Those of a netns
// are closed in the background after it: where rules were removed a moment ago, the kernel
// makes closing wait for an RCU grace period, and holds up what comes next in another netns
// meanwhile.
func settle(ctx context.Context) error {
	for {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			return fmt.Errorf("listing our descriptors: %w", err)
		}
		if !slices.ContainsFunc(entries, isNetlinkSocket) {
			return nil
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// isNetlinkSocket says no also for a descriptor that was closed meanwhile.
func isNetlinkSocket(entry os.DirEntry) bool {
	fd, err := strconv.Atoi(entry.Name())
	if err != nil {
		return false
	}
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	return err == nil && domain == unix.AF_NETLINK
}

// discard takes all network namespaces away.
func (s *namespaces) discard() error {
	errs := []error{s.host.Close()}
	for _, netns := range s.made {
		errs = append(errs, netns.Remove())
	}
	return errors.Join(errs...)
}

// timeIn times fn, without the way in.
func (s *namespaces) timeIn(ctx context.Context, f *figure, fn func() error) error {
	return s.one(ctx, func(ns *podnetns.Netns) error {
		return ns.Do(func() error { return f.time(fn) })
	})
}
