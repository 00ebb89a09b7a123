// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"ambientd/cni-plugin/podevent"
)

// badConfig is the CNI error for a network configuration that cannot be used.
func badConfig(err error) error {
	return types.NewError(podevent.CodeInvalidConfig, fmt.Sprintf("network configuration of ambient-cni: %v", err),
		"correct ambient-cni's entry in the conflist of the runtime's CNI directory")
}

// badNetns is the CNI error for a CNI_NETNS that cannot be used.
func badNetns(req podevent.Request, err error) error {
	return types.NewError(podevent.CodeInvalidNetns, fmt.Sprintf("%s: CNI_NETNS: %v", subject(req), err),
		"the runtime has to pass the path of the pod's own network namespace")
}

// subject is what a request is about, for people.
func subject(req podevent.Request) string {
	switch {
	case req.Pod.String() != "":
		return "pod " + req.Pod.String()
	case req.ContainerID != "":
		return "container " + req.ContainerID
	default:
		return "network " + req.Network
	}
}

// joined is [errors.Join] in one line: a runtime prints the message of a CNI error within JSON, where
// a line break makes it hard to read.
func joined(errs ...error) error {
	var all error
	for _, err := range errs {
		switch {
		case err == nil:
		case all == nil:
			all = err
		default:
			all = fmt.Errorf("%w; %w", all, err)
		}
	}
	return all
}

// callError is a CNI error that still tells what went wrong with the call.
type callError struct {
	cni   *types.Error
	cause error
}

// Error is what the operator reads.
func (e *callError) Error() string { return e.cni.Error() }

// Unwrap finds the CNI error, which the skeleton prints, and the cause.
func (e *callError) Unwrap() []error { return []error{e.cni, e.cause} }

// unanswered tells whether a call brought no usable answer, as opposed to one that says no.
func unanswered(err error) bool {
	var failed *callError
	return errors.As(err, &failed)
}

// strictly is the CNI error of a strict STATUS: an agent that does not answer makes the plugin
// unavailable.
func strictly(err error) error {
	var failed *callError
	if !errors.As(err, &failed) || !errors.Is(err, podevent.ErrUnavailable) {
		return err
	}
	return types.NewError(podevent.CodePluginNotAvailable, "strictStatus: "+failed.cni.Msg,
		"pods of the mesh cannot start on this node until ambientd runs; remove strictStatus to keep the node Ready meanwhile")
}

// withoutPath is an error's text without the socket's path, which package net puts into it.
func withoutPath(err error) string {
	text := err.Error()
	var op *net.OpError
	if errors.As(err, &op) {
		text = strings.Replace(text, op.Error(), op.Err.Error(), 1)
	}
	return text
}

// noAnswer is the CNI error for a call of the agent that brought no usable answer. Everything that
// passes by itself, once an agent of the right version runs, is code 11.
func noAnswer(conf config, req podevent.Request, err error) error {
	code, cause := podevent.CodeTryAgain, withoutPath(err)
	alsoStarts := map[downPolicy]string{downByNamespace: ", as do those of namespaces that were out of the mesh when it last ran"}
	var details string
	var versionErr *podevent.VersionError
	switch {
	case errors.Is(err, podevent.ErrUnavailable):
		details = fmt.Sprintf("is ambientd running on this node? see its pod in namespace %s and its log; the runtime tries again, and pods of excludeNamespaces start meanwhile%s", conf.never.AgentNamespace, alsoStarts[conf.agentDownPolicy])
	case errors.As(err, &versionErr):
		cause = fmt.Sprintf("it speaks message version %d, this plugin version %d", versionErr.Got, versionErr.Want)
		details = "while ambientd is being upgraded this passes by itself; otherwise install the plugin that belongs to the running agent"
	case errors.Is(err, podevent.ErrMalformed):
		details = "what listens there is not the ambientd that this plugin belongs to; check the keys socket and runDir"
	default:
		code, details = podevent.CodeInternal, "this is a fault of ambient-cni; please report it"
	}
	return &callError{
		cni:   types.NewError(code, fmt.Sprintf("%s: asking the agent at %s: %s", subject(req), conf.socket, cause), details),
		cause: err,
	}
}

// logger writes to standard error, which runtimes keep for plugins that fail, and only what was
// asked for.
func logger(conf config) *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: conf.logLevel}))
}
