// SPDX-License-Identifier: Apache-2.0

// Package foreign owns what a network namespace may hold that redirects traffic
// and is not what the backend in use writes: the rules of other ambient agents, by
// whatever means they were made, and our own by another means, left from when the
// agent used another backend. It finds such rules and takes them out. Both
// backends share it.
//
// It refuses to touch anybody else's rules, to make a table by looking, and to
// remove what the backend in use has written.
//
// # Order
//
// Rules of x_tables and of nf_tables cannot be swapped in one transaction. So the
// backend in use first puts in its own, and then what is found here goes. NAT is
// decided once per connection: each new one is redirected once whichever rules see
// it first, and those that are redirected already keep their translation as long
// as some chain of NAT is left. The other way round they would lose it.
//
// # Means
//
// What lies in nf_tables, native or made by iptables-nft, goes in one transaction
// over netlink, without a child process. What lies in x_tables takes the programs
// of iptables-legacy, which are only run where x_tables has tables.
package foreign

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// Means is by what a backend writes its rules.
type Means string

// The means.
const (
	NFTables       Means = "nftables"        // the table "inet ambientd"
	IPTablesNFT    Means = "iptables-nft"    // chains in the nf_tables tables that iptables-nft keeps
	IPTablesLegacy Means = "iptables-legacy" // chains in x_tables
)

// Finder finds and removes. It keeps nothing of a netns and may be used from many
// goroutines.
type Finder struct {
	sockets *rawnetlink.Sockets
}

// New returns a Finder that opens its sockets through s.
func New(s *rawnetlink.Sockets) *Finder { return &Finder{sockets: s} }

// Has reports whether the netns holds anything that Remove would take out. It
// reads only.
func (f *Finder) Has(ctx context.Context, run redirection.Runner, own Means) (bool, error) {
	found, err := f.hasNFTables(run, own)
	if found || err != nil {
		return found, wrap("looking for", err)
	}
	found, err = hasLegacy(ctx, run, own)
	return found, wrap("looking for", err)
}

// Remove takes out of a pod's netns what redirects there and was not written by
// the means given, and reports whether there was anything. Where nothing but
// empty chains is left of a table of iptables-nft, the table goes too.
func (f *Finder) Remove(ctx context.Context, run redirection.Runner, own Means) (bool, error) {
	packet, err := f.removeNFTables(run, own, sweep)
	legacy, legacyErr := removeLegacy(ctx, run, own)
	return packet || legacy, wrap("removing", errors.Join(err, legacyErr))
}

// RemoveFromHost does so in the host's netns, where only NAT's postrouting is of
// interest, tables are never swept, and x_tables' lock is waited for as long as
// wait.
func (f *Finder) RemoveFromHost(ctx context.Context, run redirection.Runner, own Means, wait time.Duration) (bool, error) {
	packet, err := f.removeNFTables(run, own, keepTables)
	legacy, legacyErr := removeLegacyFromHost(ctx, run, own, wait)
	return packet || legacy, wrap("removing", errors.Join(err, legacyErr))
}

// Sweep deletes the tables of iptables-nft in which there are only empty built-in
// chains. It is for a netns that was withdrawn and in which the caller has removed
// rules: an empty table costs every packet a little, and tells lies to those who
// look for the variant in use.
func (f *Finder) Sweep(run redirection.Runner) error {
	return wrap("sweeping", f.sweepNFTables(run))
}

func wrap(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s other rules: %w", doing, err)
}

// within calls fn with a socket that was opened in the netns.
func (f *Finder) within(run redirection.Runner, fn func(*rawnetlink.Socket) error) (err error) {
	opened, err := f.sockets.Open(run, unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.sockets.Close(opened...)) }()
	return fn(opened[0])
}
