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
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"time"

	"ambientd/certfetch"
	"ambientd/certfetch/spiffeid"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/podnetns"
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
// Apply and Remove are idempotent, Verify only reads.
type Redirection interface {
	Apply(ctx context.Context, run redirection.Runner, opts redirection.Options) (redirection.Families, error)
	Verify(ctx context.Context, run redirection.Runner, opts redirection.Options) (redirection.Families, []redirection.Difference, error)
	Remove(ctx context.Context, run redirection.Runner) error
}

// Identities is the registry that authorises certificate requests, by pod UID.
type Identities interface {
	Register(uid string, id spiffeid.ID) error
	Unregister(uid string)
	Wait(ctx context.Context, id spiffeid.ID) error
}

// NodeProxy hands a pod's netns to the node proxy. Add returns once the proxy
// has acked, Del may return earlier than the ack when ctx ends.
type NodeProxy interface {
	Add(ctx context.Context, w zds.Workload, netns *os.File) error
	Del(ctx context.Context, uid string) error
	Acked(uid string) bool
}

// Config is what an Enroller works with; every field is required.
type Config struct {
	Host        *podnetns.Host                    // the netns that is never touched, and the verifier of all others
	Pods        Pods                              // where pods are looked up
	Policy      workload.Policy                   // who belongs in the mesh
	Defaults    workload.Defaults                 // options of a pod that says nothing itself
	TrustDomain spiffeid.TrustDomain              // of every identity on this node
	Redirection Redirection                       // the backend chosen at start
	BackendName string                            // its name, for status
	Identities  Identities                        // the certificate fetcher's registry
	Fetched     func() []certfetch.IdentityStatus // certificate states, for status
	NodeProxy   NodeProxy                         // the ZDS server

	ProxyTimeout time.Duration // waiting for a proxy and its ack during ADD
	CertWait     time.Duration // waiting for the certificate during ADD; past it the pod is enrolled without
	DelProxyWait time.Duration // waiting for the proxy's ack during DEL

	Logger *slog.Logger
}

func (c Config) validate() error {
	switch {
	case c.Host == nil, c.Pods == nil, c.Redirection == nil, c.Identities == nil, c.Fetched == nil, c.NodeProxy == nil, c.Logger == nil:
		return errors.New("enroll: a part is missing in the configuration")
	case c.ProxyTimeout <= 0 || c.CertWait < 0 || c.DelProxyWait <= 0:
		return errors.New("enroll: ProxyTimeout and DelProxyWait must be positive, CertWait not negative")
	}
	return nil
}

// Enroller is the watch.Handler that enrols and withdraws pods. It is safe for
// concurrent use; operations on one pod UID wait for each other.
type Enroller struct {
	cfg     Config
	pins    *podnetns.Pins
	turns   turns
	flights flights

	applying chan struct{} // a send takes one of maxApplying places

	mu          sync.Mutex
	pods        map[string]*enrolment // by pod UID
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
	done     bool // all parts are in place; false while the first ADD is still at work
}

// New returns an Enroller with no pod enrolled.
func New(cfg Config) (*Enroller, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Enroller{
		cfg:         cfg,
		pins:        podnetns.NewPins(),
		applying:    make(chan struct{}, maxApplying),
		pods:        map[string]*enrolment{},
		attachments: newAttachments(),
	}, nil
}
