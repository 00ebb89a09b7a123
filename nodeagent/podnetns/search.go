// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// maxReasons bounds what is kept of a pod about netns that are not its own.
const maxReasons = 4

// search is one call of Find.
type search struct {
	*Finder
	surveyor *surveyor

	order []*pursuit          // as the caller gave them
	pods  map[string]*pursuit // by UID
	byIP  map[netip.Addr][]*pursuit
	owner map[Key]*pursuit // who has, or shares, a claim to a netns
	procs *processes       // nil until the pass over them

	claiming sync.Mutex // held while candidates are judged
}

// pursuit is the search for one pod's netns. It ends with a netns, or an error.
type pursuit struct {
	Wanted

	netns   *Netns
	err     error
	settled bool // a stage ended with the netns, or the error

	reasons []string
	more    int   // reasons that were not kept
	short   error // the first reason that is a shortage of the agent's own
}

func (f *Finder) newSearch(wanted []Wanted) *search {
	s := &search{
		Finder: f,
		pods:   make(map[string]*pursuit, len(wanted)),
		byIP:   make(map[netip.Addr][]*pursuit, 2*len(wanted)),
		owner:  make(map[Key]*pursuit, len(wanted)),
	}
	s.surveyor = newSurveyor(f.host, f.sockets, s.byIP)
	for _, w := range wanted {
		if s.pods[w.UID] != nil {
			s.pods[w.UID].fail(fmt.Errorf("the pod with UID %q is wanted twice", w.UID))
			continue
		}
		p := &pursuit{Wanted: w}
		p.IPs = make([]netip.Addr, 0, len(w.IPs))
		for _, ip := range w.IPs {
			p.IPs = append(p.IPs, ip.Unmap().WithZone(""))
		}
		if p.UID == "" {
			p.fail(errors.New("a pod without UID is wanted"))
		}
		if slices.ContainsFunc(p.IPs, func(ip netip.Addr) bool { return !ip.IsGlobalUnicast() }) {
			p.fail(fmt.Errorf("%v are no addresses of a pod", w.IPs))
		}
		s.order = append(s.order, p)
		s.pods[p.UID] = p
		for _, ip := range p.IPs {
			s.byIP[ip] = append(s.byIP[ip], p)
		}
	}
	return s
}

// open says whether the search for the pod goes on.
func (p *pursuit) open() bool { return p.netns == nil && p.err == nil }

// fail ends the search for the pod, unless it has ended in another way.
func (p *pursuit) fail(err error) {
	if p.open() {
		p.err = err
	}
}

// note keeps why a netns at this place is not the pod's, for its final error.
func (p *pursuit) note(place string, err error) {
	if p.short == nil && isShortage(err) {
		p.short = fmt.Errorf("%s: %w", place, err)
	}
	if len(p.reasons) == maxReasons {
		p.more++
		return
	}
	p.reasons = append(p.reasons, place+": "+err.Error())
}

// isShortage says whether err is that descriptors or memory ran out, which tells nothing of what
// was to be looked at.
func isShortage(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.ENOBUFS)
}

// incomplete is the error of a pod whose search err kept from coming to its end.
func incomplete(err error) error {
	return fmt.Errorf("looking for the pod's network namespace: %w", err)
}

// notFound is the error of a pod that no place led to.
func (p *pursuit) notFound(how string) error {
	if p.short != nil {
		return incomplete(p.short)
	}
	reasons := append([]string{how}, p.reasons...)
	if p.more > 0 {
		reasons = append(reasons, fmt.Sprintf("and %d more reasons", p.more))
	}
	return fmt.Errorf("%w: %s", ErrNotFound, strings.Join(reasons, "; "))
}

func (s *search) anyOpen() bool { return slices.ContainsFunc(s.order, (*pursuit).open) }

// settle ends a stage: what it found is the pods' from now on, whatever weaker claim a
// later stage may come upon. But of a pod that is not in the recorded netns, what there was a
// shortage for might have said that it is, or that there is another netns like that.
func (s *search) settle() {
	for _, p := range s.order {
		if p.netns != nil && p.short != nil && p.netns.key != p.Key {
			p.giveUp(incomplete(p.short))
		}
		p.settled = !p.open()
	}
}

// abandon ends the search because of err. A netns found in the stage that it stopped is
// given up too: nothing says yet that no other pod claims it.
func (s *search) abandon(err error) {
	for _, p := range s.order {
		if p.settled {
			continue
		}
		p.giveUp(err)
	}
}

// giveUp ends the search for the pod because of err, and closes the netns that it had.
func (p *pursuit) giveUp(err error) {
	if p.netns != nil {
		err = errors.Join(err, p.netns.Close())
		p.netns = nil
	}
	p.fail(err)
}

func (s *search) results() (map[string]*Netns, map[string]error) {
	found, missing := map[string]*Netns{}, map[string]error{}
	for _, p := range s.order {
		switch {
		case p.netns != nil:
			found[p.UID] = p.netns
		case p.err != nil:
			missing[p.UID] = p.err
		default:
			missing[p.UID] = p.notFound(s.extent())
		}
	}
	return found, missing
}

// extent says where was looked in vain.
func (s *search) extent() string {
	if s.procs == nil {
		return "there is no usable record, and without an address nothing else would tell that a netns is the pod's"
	}
	text := fmt.Sprintf("none of %d processes leads to it", s.procs.seen)
	if s.procs.hidden > 0 {
		text += fmt.Sprintf(" (%d could not be looked at: permission denied)", s.procs.hidden)
	}
	if len(s.netnsDirs) > 0 {
		text += ", nor does a file in " + strings.Join(s.netnsDirs, " or ")
	}
	return text
}

func (s *search) close() {
	if s.procs != nil {
		s.procs.close()
	}
}

// fromRecords opens the paths that ADDs left.
func (s *search) fromRecords(ctx context.Context) error {
	err := s.judging(func(found func(lead)) error {
		for _, p := range s.order {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			switch {
			case p.NetnsPath == "" || !p.open():
			case p.Key.BootID != s.host.key.BootID:
				p.note("record", errors.New("it was written before the last boot"))
			default:
				found(s.pathLead(p, "record", p.NetnsPath, p.Key))
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, p := range s.order {
		if len(p.IPs) == 0 && p.open() {
			p.fail(p.notFound(s.extent()))
		}
	}
	return nil
}

// pathLead is the lead that a path of the host gives. The host's /proc, which Docker's
// paths and those of processes are of, may show elsewhere here.
func (s *search) pathLead(p *pursuit, source, path string, key Key) lead {
	if below, ok := strings.CutPrefix(path, DefaultProcRoot+"/"); ok {
		path = filepath.Join(s.procRoot, below)
	}
	return pathLead{pod: p, source: source, path: path, key: key}
}

// claim gives the netns to the pod, which must be the one that a place leads to, have its
// addresses there, and not have claimed this netns already. If there is an equal claim, by
// another pod or to another netns, the search ends without one for all that are
// concerned. On an error the netns stays the caller's.
func (s *search) claim(p *pursuit, n *Netns) error {
	if uid, ok := s.holders.ByKey(n.key); ok && uid != p.UID {
		return &TakenError{Key: n.key, OtherUID: uid}
	}
	other := s.owner[n.key]
	switch {
	case other != nil && other.settled && other != p:
		return &TakenError{Key: n.key, OtherUID: other.UID}
	case other != nil && other != p:
		err := fmt.Errorf("netns %s is claimed equally for the pod with UID %s and the one with UID %s", n.key, p.UID, other.UID)
		return errors.Join(err, p.dispute(err), other.dispute(err))
	case p.netns != nil:
		s.owner[n.key] = p
		err := fmt.Errorf("netns %s and netns %s are claimed equally for the pod", p.netns.key, n.key)
		return errors.Join(err, p.dispute(err))
	case p.err != nil:
		s.owner[n.key] = p
		return p.err
	}
	s.owner[n.key] = p
	p.netns = n
	return nil
}

// dispute ends the search for a pod of which nobody can tell which netns is its own. It
// returns the error of closing the one that it had.
func (p *pursuit) dispute(why error) error {
	n := p.netns
	p.netns = nil
	p.fail(fmt.Errorf("%w: %w", ErrNotFound, why))
	if n == nil {
		return nil
	}
	return n.Close()
}
