// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"context"
	"errors"
	"net/netip"

	"ambientd/iptables/rawnetlink"
)

// ErrNotFound says that a pod has no netns that is surely its own. The text has the
// reasons; asking again helps only if something has changed.
var ErrNotFound = errors.New("the pod's network namespace was not found")

// DefaultProcRoot is where the finder looks for processes unless configured otherwise.
const DefaultProcRoot = "/proc"

// DefaultNetnsDirs returns the directories in which container runtimes keep netns as
// files: containerd, CRI-O and podman in the first (as iproute2 does), Docker in the other.
func DefaultNetnsDirs() []string { return []string{"/var/run/netns", "/run/docker/netns"} }

// Holders knows which pod holds a netns already. [Pins] does.
type Holders interface {
	ByKey(k Key) (uid string, ok bool)
}

// FinderConfig is what a Finder works with.
type FinderConfig struct {
	Host    *Host   // verifies, and is never found; required
	Holders Holders // a netns that another pod holds is never found; required
	// ProcRoot is where the host's processes show; [DefaultProcRoot] if empty. The
	// agent's own /proc may be that of another PID namespace.
	ProcRoot string
	// NetnsDirs are looked through for pods of which no process is found;
	// nil means [DefaultNetnsDirs], empty none.
	NetnsDirs []string
	// Runtime is asked for pods that have no usable record; nil if there is none to ask.
	Runtime Runtime
}

// Finder finds the netns of pods that run already. It is safe for concurrent use.
type Finder struct {
	host      *Host
	holders   Holders
	procRoot  string
	netnsDirs []string
	runtime   Runtime // may be nil
	sockets   *rawnetlink.Sockets
}

// NewFinder returns a Finder.
func NewFinder(cfg FinderConfig) (*Finder, error) {
	if cfg.Host == nil || cfg.Holders == nil {
		return nil, errors.New("podnetns: a finder needs the host's netns and the holders of others")
	}
	if cfg.ProcRoot == "" {
		cfg.ProcRoot = DefaultProcRoot
	}
	if cfg.NetnsDirs == nil {
		cfg.NetnsDirs = DefaultNetnsDirs()
	}
	return &Finder{
		host: cfg.Host, holders: cfg.Holders, procRoot: cfg.ProcRoot, netnsDirs: cfg.NetnsDirs, runtime: cfg.Runtime,
		sockets: rawnetlink.New(),
	}, nil
}

// Wanted is a pod whose netns is to be found.
type Wanted struct {
	UID string // as the kubelet names cgroups by it
	// IPs are the pod's addresses. Without any only a record leads to the netns.
	IPs []netip.Addr
	// NetnsPath and Key are from the record that the pod's enrolment left, if there is one. The path
	// is one of the host's, and empty for a pod that was found without.
	NetnsPath string
	Key       Key
}

// Find returns the netns of each wanted pod by UID, for the caller to close, and says
// of each other one why it has none. Such an error wraps [ErrNotFound] unless the
// search itself did not come to its end: then it wraps what stopped it, such as the
// end of ctx, or a shortage of descriptors or memory.
//
// It looks in four places, and in the next one only for pods that the last did not
// have. First at the path in the pod's record: the netns there must have the
// recorded key. Then where the container runtime says, if there is one to ask. Then at
// the processes, in one pass for all pods: a process' cgroup says which pod it belongs to.
// Last at the netns that the runtimes keep as files, for pods without a process, as runtimes
// leave them that have no infra container.
//
// Neither a path nor a cgroup is proof: paths are used again, and a process of one pod
// may have entered the netns of another, or the host's. So a netns is returned only if
//   - it is not the host's own, nor held by another pod,
//   - it holds the pod's addresses: one at least, and no other address in the family of
//     one that is missing (IPv6 may have been turned off),
//   - no other wanted pod has an equal claim to it, and the search has not come upon a
//     second one for the pod,
//   - no process of the pod, nor the runtime, says that the pod lives in the recorded netns
//     after all. With NET_ADMIN a pod may have moved its addresses from there to a netns that
//     it made. It is not found then: its own netns does not hold what it is known by, and the
//     one that does is not its own.
//
// Every netns is looked at through a descriptor that stays open, so that none is
// confused with a later one of the same inode number.
func (f *Finder) Find(ctx context.Context, wanted []Wanted) (map[string]*Netns, map[string]error) {
	s := f.newSearch(wanted)
	defer s.close()
	for _, stage := range []func(context.Context) error{s.fromRecords, s.fromRuntime, s.fromProcesses, s.fromFiles} {
		if !s.anyOpen() {
			break
		}
		if err := stage(ctx); err != nil {
			s.abandon(incomplete(err))
			break
		}
		s.settle()
	}
	return s.results()
}
