// SPDX-License-Identifier: Apache-2.0

// Package podevent is the one message between the CNI plugin and the node agent: a CNI event that
// goes in with the pod's network namespace as a descriptor, and the agent's answer that comes out.
//
// The wire is a unix stream socket. A connection carries one request and one reply, each a 4-byte
// big-endian length followed by that many bytes of JSON. The descriptor travels as SCM_RIGHTS with
// the request's first byte, so that the agent opens no path of the runtime's. The client keeps its
// write side open until the reply has come: an end of file before that is the client hanging up.
//
// Both programs link this package, and the plugin runs on every pod start, so it imports only the
// standard library, and nothing of that which is heavy (no net/http, no crypto). It refuses to
// know what the events mean: no Kubernetes, no labels, no retry.
//
// It also owns the form of what the two leave for each other on disk: the plugin its DELs while the
// agent is away ([Spool]), and the agent the policy by which the plugin decides then ([Policy]).
//
// A field that an older peer may safely ignore is added without a new [Version]; anything else
// needs one. Peers of different versions do not guess: both sides report the two numbers.
package podevent

import (
	"errors"
	"fmt"
	"net/netip"
)

// Version is the version of the message that this package speaks.
const Version = 1

// DefaultSocket is where the agent listens and the plugin connects unless configured otherwise.
const DefaultSocket = DefaultRunDir + SocketInRunDir

// DefaultRunDir is the agent's run directory, on a tmpfs: a reboot starts clean.
const DefaultRunDir = "/run/ambientd"

// SocketInRunDir is where in the run directory the socket is.
const SocketInRunDir = "/private/cni.sock"

// The commands, spelled as CNI_COMMAND has them. VERSION is missing because the plugin answers it
// without the agent.
const (
	CommandAdd    = "ADD"
	CommandDel    = "DEL"
	CommandCheck  = "CHECK"
	CommandGC     = "GC"
	CommandStatus = "STATUS"
)

// What became of a request, in [Reply.Result].
const (
	// ResultEnrolled answers ADD: every part of the pod is in the mesh.
	ResultEnrolled = "enrolled"
	// ResultSkipped answers ADD: the pod stays outside the mesh, and Reason says why.
	ResultSkipped = "skipped"
	// ResultWithdrawn answers DEL: nothing of the attachment is left, whether there was anything or not.
	ResultWithdrawn = "withdrawn"
	// ResultOK answers CHECK, GC and STATUS.
	ResultOK = "ok"
)

// ReasonUnrecorded answers a DEL for which there was nothing to do, in [Reply.Reason]. A runtime
// repeats the DEL of each sandbox a few times.
const ReasonUnrecorded = "the attachment is not recorded here"

// The CNI error codes that cross this border, in [Error.Code]. Codes below 100 are those of the CNI
// specification (section "Error"); from 100 on a plugin may define its own.
const (
	// CodeInvalidConfig says that the network configuration is wrong: a bad value, or a prevResult
	// that is missing or cannot be parsed. Trying again does not help.
	CodeInvalidConfig uint = 7
	// CodeInvalidNetns says that CNI_NETNS is no usable network namespace: gone, of another type, the
	// host's own, or another pod's. The CNI library's numbering (types.ErrInvalidNetNS).
	CodeInvalidNetns uint = 8
	// CodeTryAgain says that something is not reachable yet: the agent, the node proxy, the API, the
	// CA. The runtime is to try again later.
	CodeTryAgain uint = 11
	// CodePluginNotAvailable answers STATUS only: the plugin cannot serve ADD. A runtime that gets it
	// reports its network as not ready, and the node's pods are evicted after some minutes.
	CodePluginNotAvailable uint = 50
	// CodeRedirection is ours: the packet rules, policy rule or route of the pod could not be programmed.
	CodeRedirection uint = 100
	// CodeIdentityDenied is ours: the CA refuses the pod's identity, finally.
	CodeIdentityDenied uint = 101
	// CodeInternal is the CNI library's number (types.ErrInternal) for what should not happen: here, a
	// request that the agent cannot understand although the version is right.
	CodeInternal uint = 999
)

// Request is a CNI event.
type Request struct {
	// Version is set by [Call]; a reader never sees another than [Version].
	Version int `json:"version"`
	// Command is one of the Command constants.
	Command string `json:"command"`
	// Network is the network configuration's name. Attachments of different networks are different.
	Network string `json:"network"`
	// ContainerID is CNI_CONTAINERID, the sandbox; empty for GC and STATUS.
	ContainerID string `json:"containerID,omitempty"`
	// IfName is CNI_IFNAME; empty for GC and STATUS.
	IfName string `json:"ifName,omitempty"`
	// NetnsPath is CNI_NETNS, as a note for later: during the event the descriptor counts, and the agent
	// opens no path.
	NetnsPath string `json:"netnsPath,omitempty"`
	// Pod is what CNI_ARGS says of the pod. Only ADD is sure to have namespace and name.
	Pod Pod `json:"pod,omitzero"`
	// IPs are the addresses that prevResult gives to the pod, in its order; ADD only.
	IPs []netip.Addr `json:"ips,omitempty"`
	// ValidAttachments are those that the runtime still knows; GC only. None means that none is valid.
	ValidAttachments []Attachment `json:"validAttachments,omitempty"`
}

// Pod names a pod as the runtime's CNI_ARGS do.
type Pod struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	// UID is empty where the runtime does not pass K8S_POD_UID. A static pod's is the hash of its file.
	UID string `json:"uid,omitempty"`
}

// String is "namespace/name", or "" where there is neither.
func (p Pod) String() string {
	if p.Namespace == "" && p.Name == "" {
		return ""
	}
	return p.Namespace + "/" + p.Name
}

// Attachment is what the CNI specification identifies an ADD by, within a network. It is comparable.
type Attachment struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
}

// Attachment is the attachment that the request is about; zero for GC and STATUS.
func (r Request) Attachment() Attachment {
	return Attachment{ContainerID: r.ContainerID, IfName: r.IfName}
}

// maxNameLen bounds each single string of a request, in bytes. The longest legal one is a pod name
// (253, a DNS subdomain); container IDs have no limit of their own in the CNI specification.
const maxNameLen = 512

// maxPathLen is PATH_MAX (limits.h): no longer path could have been opened.
const maxPathLen = 4096

// Validate reports what is missing or too much for the request's command, or nil.
func (r Request) Validate() error {
	for _, field := range []struct{ name, value string }{
		{"network", r.Network},
		{"containerID", r.ContainerID},
		{"ifName", r.IfName},
		{"pod.namespace", r.Pod.Namespace},
		{"pod.name", r.Pod.Name},
		{"pod.uid", r.Pod.UID},
	} {
		if len(field.value) > maxNameLen {
			return fmt.Errorf("%s is %d bytes long, at most %d are allowed", field.name, len(field.value), maxNameLen)
		}
	}
	if len(r.NetnsPath) > maxPathLen {
		return fmt.Errorf("netnsPath is %d bytes long, at most %d are allowed", len(r.NetnsPath), maxPathLen)
	}
	if r.Network == "" {
		return errors.New("network is empty")
	}
	switch r.Command {
	case CommandAdd, CommandDel, CommandCheck:
		if r.ContainerID == "" || r.IfName == "" {
			return fmt.Errorf("%s without containerID or ifName", r.Command)
		}
		if r.Command == CommandAdd && (r.Pod.Namespace == "" || r.Pod.Name == "") {
			return errors.New("ADD without the pod's namespace or name")
		}
	case CommandGC, CommandStatus:
		if r.ContainerID != "" || r.IfName != "" {
			return fmt.Errorf("%s is not about one attachment, but containerID or ifName is set", r.Command)
		}
	default:
		return fmt.Errorf("unknown command %.32q", r.Command)
	}
	if len(r.ValidAttachments) > 0 && r.Command != CommandGC {
		return fmt.Errorf("%s with validAttachments, which only GC has", r.Command)
	}
	for i, a := range r.ValidAttachments {
		if a.ContainerID == "" || a.IfName == "" {
			return fmt.Errorf("validAttachments[%d] without containerID or ifName", i)
		}
	}
	for i, ip := range r.IPs {
		if !ip.IsValid() {
			return fmt.Errorf("ips[%d] is no address", i)
		}
	}
	return nil
}

// needsNetns tells whether the command is about the inside of a pod's network namespace. DEL may
// come with the namespace, or without it when it is gone.
func (r Request) needsNetns() bool {
	return r.Command == CommandAdd || r.Command == CommandCheck
}

// mayHaveNetns tells whether a descriptor makes sense with the command.
func (r Request) mayHaveNetns() bool {
	return r.needsNetns() || r.Command == CommandDel
}

// Reply is the agent's answer.
type Reply struct {
	// Version is set by [WriteReply]; [Call] never returns another than [Version].
	Version int `json:"version"`
	// Result is one of the Result constants; empty when Error is set.
	Result string `json:"result,omitempty"`
	// Reason is for people: why a pod was skipped, what is pending.
	Reason string `json:"reason,omitempty"`
	// Error is nil on success.
	Error *Error `json:"error,omitempty"`
}

// Error is a CNI error as the plugin prints it.
type Error struct {
	// Code is one of the Code constants.
	Code uint `json:"code"`
	// Msg names the pod, the step and the cause.
	Msg string `json:"msg"`
	// Details say what to do next.
	Details string `json:"details,omitempty"`
}

// Error is the message and the details in one line.
func (e *Error) Error() string {
	if e.Details == "" {
		return e.Msg
	}
	return e.Msg + "; " + e.Details
}

// VersionError says that the other side speaks another version of this package's message, which
// happens for a moment while plugin and agent are upgraded.
type VersionError struct {
	// Got is what the message carries, Want what this side speaks.
	Got, Want int
}

// Error names both versions.
func (e *VersionError) Error() string {
	return fmt.Sprintf("the message has version %d, version %d is spoken here", e.Got, e.Want)
}

// ErrMalformed is wrapped by errors about what the other side sent, as opposed to the connection
// failing: a bad length, no JSON, a missing field, a surplus descriptor.
var ErrMalformed = errors.New("malformed message")

// ErrOutOfDescriptors is wrapped by the error of [ReadRequest] when this process may open no more
// files, and so could not receive the network namespace that the request needs.
var ErrOutOfDescriptors = errors.New("no descriptor is free to receive the network namespace")

// ErrUnavailable is wrapped by every error of [Call] that means "no answer": nobody listens, the
// agent hung up, or the context ended first.
var ErrUnavailable = errors.New("the agent does not answer")
