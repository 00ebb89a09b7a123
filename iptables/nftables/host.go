// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// maxHostDifferences bounds how many entries VerifyHost names.
const maxHostDifferences = 40

// EnsureHost makes the host's namespace, which run enters, hold the table that the options call for: the rule that gives
// probes their source, and the sets that say whose probes. It writes nothing where that is so. Otherwise it repairs the
// table in one transaction, and keeps the entries: where sets are right it leaves them alone, else it makes them anew with
// the entries that fit the options. It prunes nothing: which entries there should be is for [Backend.SetEntries].
func (b *Backend) EnsureHost(ctx context.Context, run redirection.Runner, opts redirection.HostOptions) error {
	if err := opts.Validate(); err != nil {
		return fmt.Errorf("host options: %w", err)
	}
	err := b.host.use(ctx, b.sockets, run, func(socket *rawnetlink.Socket) error {
		state, err := readHost(socket)
		if err != nil {
			return err
		}
		if state == nil {
			return commit(socket, assemble(buildHost(opts)))
		}
		want, err := wantedHost(opts)
		if err != nil {
			return err
		}
		switch {
		case len(differences(want, state.table)) == 0:
			return nil
		case len(setDifferences(want, state.table)) == 0 && state.table.flags == want.flags && state.table.others == 0:
			return commit(socket, assemble(rebuildHostChains(opts, state.table)))
		default:
			return commit(socket, assemble(append(buildHost(opts), additions(state.fitting(opts))...)))
		}
	})
	if err != nil {
		return fmt.Errorf("setting up the probes' rule (nftables): %w", err)
	}
	return nil
}

// VerifyHost compares the host's namespace with what [Backend.EnsureHost] makes of the options, and the sets with exactly
// these entries. It writes nothing.
func (b *Backend) VerifyHost(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries []redirection.HostEntry) ([]redirection.Difference, error) {
	if err := validateHost(opts, entries); err != nil {
		return nil, err
	}
	var found []redirection.Difference
	err := b.host.use(ctx, b.sockets, run, func(socket *rawnetlink.Socket) error {
		state, err := readHost(socket)
		if err != nil {
			return err
		}
		if state == nil {
			found = []redirection.Difference{{What: "table " + redirection.HostTable, Want: fmt.Sprintf("with %d entries", len(entries))}}
			return nil
		}
		want, err := wantedHost(opts)
		if err != nil {
			return err
		}
		state.table.explain(hostMeanings(opts, want))
		found = differences(want, state.table)
		if len(setDifferences(want, state.table)) == 0 { // else their elements are no matter
			err = state.confirm(socket, state.missing(entries))
		}
		found = append(found, state.entryDifferences(entries)...)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("verifying the probes' rule (nftables): %w", err)
	}
	return found, nil
}

// SetEntries makes the sets hold exactly these entries, in one transaction. The table must be there.
func (b *Backend) SetEntries(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries []redirection.HostEntry) error {
	if err := validateHost(opts, entries); err != nil {
		return err
	}
	var changes []change
	for _, family := range opts.Families().Each() {
		set := setOf(family)
		changes = append(changes, change{message: unix.NFT_MSG_DELSETELEM, payload: ofSet(set), what: "emptying set " + set})
	}
	batch := assemble(append(changes, additions(entries)...))
	err := b.host.use(ctx, b.sockets, run, func(socket *rawnetlink.Socket) error { return commit(socket, batch) })
	if err != nil {
		return fmt.Errorf("setting the entries of probes (nftables): %w", err)
	}
	return nil
}

// AddEntries adds entries to their sets, all or none; one that is there already is fine. The table must be there.
func (b *Backend) AddEntries(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries ...redirection.HostEntry) error {
	if err := validateEntries(opts, entries); err != nil {
		return err
	}
	if err := b.changeEntries(ctx, run, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, entries); err != nil {
		return fmt.Errorf("adding %s to the probes' sets (nftables): %w", entries, err)
	}
	return nil
}

// DelEntries takes entries out of their sets; one that is not there is fine, and so is no set at all. Each is tried,
// whatever becomes of the others.
func (b *Backend) DelEntries(ctx context.Context, run redirection.Runner, opts redirection.HostOptions, entries ...redirection.HostEntry) error {
	if err := validateEntries(opts, entries); err != nil {
		return err
	}
	err := b.changeEntries(ctx, run, unix.NFT_MSG_DELSETELEM, 0, entries)
	if err != nil && len(entries) > 1 {
		// One that is not there keeps all of the transaction from happening.
		errs := make([]error, 0, len(entries))
		for _, entry := range entries {
			errs = append(errs, b.DelEntries(ctx, run, opts, entry))
		}
		return errors.Join(errs...)
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("taking %s out of the probes' sets (nftables): %w", entries, err)
	}
	return nil
}

// RemoveHost deletes the host's table, and closes the socket that is kept for its entries. Where there is none it
// succeeds.
func (b *Backend) RemoveHost(ctx context.Context, run redirection.Runner) error {
	err := b.host.use(ctx, b.sockets, run, func(socket *rawnetlink.Socket) error {
		_, err := removeTableIfThere(socket, redirection.HostTable, encodeRemoval(redirection.HostTable))
		return errors.Join(err, b.host.close())
	})
	if err != nil {
		return fmt.Errorf("removing the probes' rule (nftables): %w", err)
	}
	return nil
}

func validateHost(opts redirection.HostOptions, entries []redirection.HostEntry) error {
	if err := opts.Validate(); err != nil {
		return fmt.Errorf("host options: %w", err)
	}
	return validateEntries(opts, entries)
}

func validateEntries(opts redirection.HostOptions, entries []redirection.HostEntry) error {
	for _, entry := range entries {
		if err := opts.ValidateEntry(entry); err != nil {
			return err
		}
	}
	return nil
}

// changeEntries sends elements, in one transaction. It is what an enrolment waits for, so it is written out by hand.
func (b *Backend) changeEntries(ctx context.Context, run redirection.Runner, message, flags uint16, entries []redirection.HostEntry) error {
	if len(entries) == 0 {
		return nil
	}
	subsystem := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	request := make([]byte, 0, 512)
	request = rawnetlink.AppendMessage(request, rawnetlink.Message{
		Type: unix.NFNL_MSG_BATCH_BEGIN, Flags: unix.NLM_F_REQUEST, Payload: subsystem,
	})
	parts := bySet(entries)
	sequence := uint32(0)
	for i, part := range parts {
		sequence++
		element := rawnetlink.Message{
			Type: messageType(message), Flags: unix.NLM_F_REQUEST | flags, Sequence: sequence,
			Payload: appendElements(ofSet(setOf(redirection.FamilyOf(part[0].Addr))), part...),
		}
		if i == len(parts)-1 {
			element.Flags |= unix.NLM_F_ACK
		}
		request = rawnetlink.AppendMessage(request, element)
	}
	request = rawnetlink.AppendMessage(request, rawnetlink.Message{
		Type: unix.NFNL_MSG_BATCH_END, Flags: unix.NLM_F_REQUEST, Sequence: sequence + 1, Payload: subsystem,
	})
	return b.host.use(ctx, b.sockets, run, func(socket *rawnetlink.Socket) error {
		refused, err := socket.Execute(request, sequence)
		if err == nil && len(refused) > 0 {
			err = refused[0]
		}
		return err
	})
}

// wantedHost returns the host's table as the options call for it.
func wantedHost(opts redirection.HostOptions) (*table, error) {
	want, err := decode(redirection.HostTable, assemble(buildHost(opts)).bytes)
	if err != nil {
		return nil, fmt.Errorf("reading back the encoded rules: %w", err)
	}
	want.explain(hostMeanings(opts, want))
	return want, nil
}

// hostMeanings returns what the expressions of the host's rules mean in the model's words.
func hostMeanings(opts redirection.HostOptions, want *table) map[string]string {
	meanings := map[string]string{}
	for i, rule := range redirection.HostRules(opts) {
		meanings[want.chains[0].rules[i].expressions] = rule.String()
	}
	return meanings
}

// fitting returns the entries that the sets of the options can hold.
func (s *hostState) fitting(opts redirection.HostOptions) []redirection.HostEntry {
	var entries []redirection.HostEntry
	for entry := range s.entries {
		if opts.ValidateEntry(entry) == nil {
			entries = append(entries, entry)
		}
	}
	slices.SortFunc(entries, redirection.HostEntry.Compare)
	return entries
}

// missing returns those of the entries that the state does not hold, each once, in order.
func (s *hostState) missing(wanted []redirection.HostEntry) []redirection.HostEntry {
	var missing []redirection.HostEntry
	for _, entry := range wanted {
		if !s.entries[entry] {
			missing = append(missing, entry)
		}
	}
	slices.SortFunc(missing, redirection.HostEntry.Compare)
	return slices.Compact(missing)
}

// entryDifferences returns in what the sets' elements are not the entries wanted.
func (s *hostState) entryDifferences(wanted []redirection.HostEntry) []redirection.Difference {
	var found []redirection.Difference
	what := func(e redirection.HostEntry) string { return "entry of set " + setOf(redirection.FamilyOf(e.Addr)) }
	for _, entry := range s.missing(wanted) {
		found = append(found, redirection.Difference{What: what(entry), Want: entry.String()})
	}
	want := map[redirection.HostEntry]bool{}
	for _, entry := range wanted {
		want[entry] = true
	}
	var surplus []redirection.HostEntry
	for entry := range s.entries {
		if !want[entry] {
			surplus = append(surplus, entry)
		}
	}
	slices.SortFunc(surplus, redirection.HostEntry.Compare)
	for _, entry := range surplus {
		found = append(found, redirection.Difference{What: what(entry), Got: entry.String()})
	}
	if s.strange > 0 {
		found = append(found, redirection.Difference{What: "probe sets", Got: fmt.Sprintf("elements that are no addresses: %d", s.strange)})
	}
	if more := len(found) - maxHostDifferences; more > 0 {
		found = append(found[:maxHostDifferences], redirection.Difference{What: "probe sets", Got: fmt.Sprintf("%d more differences", more)})
	}
	return found
}

// elementsPerMessage keeps a message's list of elements, of up to 36 bytes each, within the 64 KiB that an attribute's
// length can say.
const elementsPerMessage = 1024

// additions returns the changes that add the entries to their sets.
func additions(entries []redirection.HostEntry) []change {
	var changes []change
	for _, part := range bySet(entries) {
		set := setOf(redirection.FamilyOf(part[0].Addr))
		changes = append(changes, change{
			message: unix.NFT_MSG_NEWSETELEM, flags: unix.NLM_F_CREATE,
			payload: appendElements(ofSet(set), part...), what: "adding elements to set " + set,
		})
	}
	return changes
}

// bySet returns the entries in parts of one set each, as large as one message may be.
func bySet(entries []redirection.HostEntry) [][]redirection.HostEntry {
	var parts [][]redirection.HostEntry
	for _, family := range redirection.DualStack.Each() {
		var ofFamily []redirection.HostEntry
		for _, entry := range entries {
			if redirection.FamilyOf(entry.Addr) == family {
				ofFamily = append(ofFamily, entry)
			}
		}
		for part := range slices.Chunk(ofFamily, elementsPerMessage) {
			parts = append(parts, part)
		}
	}
	return parts
}

// appendElements appends the list of elements to a payload that names their set.
func appendElements(payload []byte, entries ...redirection.HostEntry) []byte {
	list := make([]byte, 0, 40*len(entries))
	for _, entry := range entries {
		var key [20]byte
		value := rawnetlink.AppendAttribute(nil, rawnetlink.Attribute{Type: unix.NFTA_DATA_VALUE, Data: appendKey(key[:0], entry)})
		list = appendNested(list, unix.NFTA_LIST_ELEM, appendNested(nil, unix.NFTA_SET_ELEM_KEY, value))
	}
	return appendNested(payload, unix.NFTA_SET_ELEM_LIST_ELEMENTS, list)
}

// hostSocket keeps a socket in the host's namespace: entries come and go with every pod, and opening a socket takes
// longer than changing one. Its zero value is ready; it may be used concurrently.
type hostSocket struct {
	mu     sync.Mutex // held for each transaction, so that what was read is still so when it is replaced
	socket *rawnetlink.Socket
	netns  netnsID // that the socket is in; it pins it, so the number cannot be another's
}

// netnsID tells network namespaces apart while they are there: the device and inode number of their file.
type netnsID struct{ device, inode uint64 }

// use calls fn with the socket of the namespace that run enters. After an error the next call opens a new one: there may
// be answers left in this one that nobody waits for.
func (h *hostSocket) use(ctx context.Context, sockets *rawnetlink.Sockets, run redirection.Runner, fn func(*rawnetlink.Socket) error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := run(func() error { return h.open(sockets) }); err != nil {
		return err
	}
	h.socket.Forget()
	if err := fn(h.socket); err != nil {
		return errors.Join(err, h.close())
	}
	return nil
}

// open makes the socket one of the thread's namespace, unless it is.
func (h *hostSocket) open(sockets *rawnetlink.Sockets) error {
	var file unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &file); err != nil {
		return fmt.Errorf("looking at the thread's network namespace: %w", err)
	}
	here := netnsID{device: file.Dev, inode: file.Ino}
	if h.socket != nil && h.netns == here {
		return nil
	}
	opened, err := sockets.Open(redirection.Runner(func(fn func() error) error { return fn() }), unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	err = h.close()
	h.socket, h.netns = opened[0], here
	return err
}

func (h *hostSocket) close() error {
	if h.socket == nil {
		return nil
	}
	socket := h.socket
	h.socket = nil
	return socket.Close()
}
