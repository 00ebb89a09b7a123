// SPDX-License-Identifier: Apache-2.0

// Package enroll owns the one step that puts a pod in the mesh and takes it
// out again: netns pinned, identity registered, redirection in the kernel, node
// proxy told, certificate waited for, in this order and with an undo for each.
//
// It keeps invariant 1, whole or nothing: an enrolment that fails in any part
// is undone in all parts before its error is returned. It keeps invariant 4,
// never the wrong netns: work on one pod UID is serialised, state is found by
// UID and netns key, and an attachment only ever ends what it began itself.
//
// It refuses to decide who belongs in the mesh (package workload does), to enter
// a netns (package podnetns does), and to know how an event reached it (package
// watch does).
package enroll

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"time"

	"ambientd/certfetch"
	"ambientd/certfetch/spiffeid"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/records"
	"ambientd/nodeagent/workload"
	"ambientd/nodeagent/zds"
)

// undoTimeout bounds taking one part of an enrolment back.
const undoTimeout = 3 * time.Second

// maxApplying bounds how many enrolments write rules at once, which takes a process
// each where that is done with iptables. All that an enrolment waits for besides
// costs nothing.
const maxApplying = 64

// Pods finds a pod by what the runtime says of it. The UID may be empty: not
// every runtime passes one.
type Pods interface {
	Lookup(ctx context.Context, namespace, name, uid string) (workload.Pod, error)
}

// Redirection programs the packet rules, policy rule and route of one netns.
// Apply and Remove are idempotent; Verify and HasOwn, which tells whether there are packet rules
// of ours, only read.
type Redirection interface {
	Apply(ctx context.Context, ns redirection.Netns, opts redirection.Options) (redirection.Families, error)
	Verify(ctx context.Context, ns redirection.Netns, opts redirection.Options) (redirection.Families, []redirection.Difference, error)
	HasOwn(ctx context.Context, run redirection.Runner) (bool, error)
	Remove(ctx context.Context, ns redirection.Netns) error
}

// Memory is what a Redirection may have besides: what it knows of the packet rules in
// a netns, named by its cookie, so that after a restart it need not read all of them.
type Memory interface {
	Seen(cookie uint64) (redirection.Sighting, bool)
	Recall(cookie uint64, seen redirection.Sighting)
}

// Identities is the registry that authorises certificate requests, by pod UID.
type Identities interface {
	Register(uid string, id spiffeid.ID) error
	Unregister(uid string)
	Wait(ctx context.Context, id spiffeid.ID) error
}

// Predecessors removes what other ambient agents, and our other backends, have set
// up in a netns, or of the other backends alone, and says whether there was anything.
type Predecessors interface {
	RemovePredecessors(ctx context.Context, ns redirection.Netns) (bool, error)
	RemoveOther(ctx context.Context, ns redirection.Netns) (bool, error)
}

// NodeProxy hands a pod's netns to the node proxy. Add returns once the proxy
// has acked, Put does not wait, Del may return earlier than the ack when ctx ends.
type NodeProxy interface {
	Add(ctx context.Context, w zds.Workload, netns *os.File) error
	Put(w zds.Workload, netns *os.File) error
	Del(ctx context.Context, uid string) error
}

// ProxySet tells of the pods that node proxies are meant to have.
type ProxySet interface {
	Holds(uid string) bool // the pod is in the set
	Acked(uid string) bool // and the newest proxy has accepted it
}

// Probes lets the host's probes of a pod bypass the proxy.
type Probes interface {
	Add(ctx context.Context, uid string, addrs []netip.Addr, ports []uint16) error
	Remove(ctx context.Context, uid string) error
	// Together calls fn, and has what is added meanwhile written at its end.
	Together(ctx context.Context, fn func()) error
	// Expect has what is about to be added for several pods written at once, and what was not
	// added taken out when done is called, which is never nil.
	Expect(ctx context.Context, pods iter.Seq2[[]netip.Addr, []uint16]) (done func(context.Context) error, err error)
}

// Records keeps a note of each pod on disk, for the agent's next start.
type Records interface {
	Put(r records.Record) error
	Delete(uid string) error
	All() ([]records.Record, []*records.FileError, error)
}

// ExistingConnections says what becomes of the TCP connections that a pod has when
// it is enrolled while it runs.
type ExistingConnections string

// What may become of them.
const (
	KeepConnections  ExistingConnections = "keep"  // they go on, uncaptured, until they end
	ResetConnections ExistingConnections = "reset" // their next packet is redirected, which ends them
)

// Config is what an Enroller works with; every field but Reporter is required.
type Config struct {
	Host         *podnetns.Host                    // the netns that is never touched, and the verifier of all others
	Pins         *podnetns.Pins                    // the netns of enrolled pods, which the Finder must know too
	Pods         Pods                              // where pods are looked up
	Inventory    Inventory                         // all pods of this node
	Finder       Finder                            // finds the netns of running pods
	Records      Records                           // what the agent remembers over a restart
	Policy       workload.Policy                   // who belongs in the mesh
	Defaults     workload.Defaults                 // options of a pod that says nothing itself
	TrustDomain  spiffeid.TrustDomain              // of every identity on this node
	Redirection  Redirection                       // the backend chosen at start
	BackendName  string                            // its name, for status
	Predecessors Predecessors                      // what may be in a running pod's netns already
	Probes       Probes                            // the host's set of probed addresses
	Identities   Identities                        // the certificate fetcher's registry
	Fetched      func() []certfetch.IdentityStatus // certificate states, for status
	NodeProxy    NodeProxy                         // the ZDS server
	ProxySet     ProxySet                          // what the proxies have
	Registered   func(spiffeid.ID) bool            // whether the registry has an identity

	Reporter Reporter // may be nil: nobody is told

	ExistingConnections ExistingConnections
	Connections         Connections // counts those that are kept, for status; nil: they are not counted

	ProxyTimeout time.Duration // waiting for a proxy and its ack during ADD
	CertWait     time.Duration // waiting for the certificate during ADD; past it the pod is enrolled without
	DelProxyWait time.Duration // waiting for the proxy's ack during DEL

	Logger *slog.Logger
}

func (c Config) validate() error {
	for name, missing := range map[string]bool{
		"Host": c.Host == nil, "Pins": c.Pins == nil, "Pods": c.Pods == nil, "Inventory": c.Inventory == nil, "Finder": c.Finder == nil,
		"Records": c.Records == nil, "Redirection": c.Redirection == nil, "Predecessors": c.Predecessors == nil, "Probes": c.Probes == nil,
		"Identities": c.Identities == nil, "Fetched": c.Fetched == nil, "NodeProxy": c.NodeProxy == nil, "ProxySet": c.ProxySet == nil, "Registered": c.Registered == nil, "Logger": c.Logger == nil,
	} {
		if missing {
			return fmt.Errorf("enroll: no %s given", name)
		}
	}
	if c.ProxyTimeout <= 0 || c.CertWait < 0 || c.DelProxyWait <= 0 {
		return errors.New("enroll: ProxyTimeout and DelProxyWait must be positive, CertWait not negative")
	}
	return nil
}

// Enroller is the watch.Handler that enrols and withdraws pods. It is safe for
// concurrent use; operations on one pod UID wait for each other.
type Enroller struct {
	cfg     Config
	pins    *podnetns.Pins
	memory  Memory // nil if the backend has none
	turns   turns
	flights flights
	wake    chan struct{} // holds a token when Run is to look again
	changed chan struct{} // holds a token when the set of enrolled pods has changed

	applying chan struct{} // a send takes one of maxApplying places
	counts   counts        // of connections, for status

	mu          sync.Mutex
	pods        map[string]*enrolment // by pod UID
	places      map[string]place      // by pod UID, also of pods outside the mesh
	withheld    map[string]bool       // by pod UID: withdrawn by an operator, to stay out
	outside     map[string]string     // by pod UID: why one that belongs in the mesh and runs here is not enrolled
	released    []string              // pod UIDs that are not withheld any more, for Run
	ended       map[string]ending     // by pod UID: a sandbox whose last DEL came
	holds       map[string]holding    // by pod UID: rules of ours in its netns
	changes     map[string]struct{}   // by pod UID: enrolled or withdrawn since Changes was called
	attachments attachments
}

// enrolment is one pod that is in the mesh or on its way in. Its fields are
// written by whoever holds the turn of its UID, with Enroller.mu held.
type enrolment struct {
	pod      workload.Pod
	identity spiffeid.ID
	options  redirection.Options
	families redirection.Families
	netns    podnetns.Key
	ips      []netip.Addr
	place    place
	// malformed are the pod's options that count as absent.
	malformed []workload.Malformed
	// captured tells that the pod had rules before: they stay, whatever becomes of the rest, so that it
	// fails closed. The turn alone protects it.
	captured bool
	// done is false while the parts are being put in place for the first time.
	done bool
	// loopbackDown is since when audits have found the pod's loopback device down. The turn alone
	// protects it.
	loopbackDown time.Time
	// recorded is what the pod's record says of its packet rules.
	recorded redirection.Sighting
}

// New returns an Enroller with no pod enrolled.
func New(cfg Config) (*Enroller, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if cfg.Reporter == nil {
		cfg.Reporter = silent{}
	}
	memory, _ := cfg.Redirection.(Memory)
	return &Enroller{
		cfg:         cfg,
		pins:        cfg.Pins,
		memory:      memory,
		wake:        make(chan struct{}, 1),
		changed:     make(chan struct{}, 1),
		applying:    make(chan struct{}, maxApplying),
		pods:        map[string]*enrolment{},
		places:      map[string]place{},
		withheld:    map[string]bool{},
		ended:       map[string]ending{},
		holds:       map[string]holding{},
		changes:     map[string]struct{}{},
		attachments: newAttachments(),
	}, nil
}
