// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"errors"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"ambientd/nodeagent/apiserver"
)

// resource is what is watched, and into what.
type resource struct {
	name               string
	kind               runtime.Object
	list               runtime.Object
	fields             string // selector
	accept, acceptList string // headers; empty: whole objects
	into               *known
}

// pauses between attempts while the API server is away: half a second at first, at most
// fifteen, so that all nodes together are no burden and a node is not late for long.
func pauses() *wait.Backoff {
	return &wait.Backoff{Duration: 500 * time.Millisecond, Cap: 15 * time.Second, Steps: 6, Factor: 2, Jitter: 0.5}
}

// watch keeps what is known of the resource up to date until ctx ends. An expired watch
// makes the reflector list anew, which replaces what is known.
func (s *Source) watch(ctx context.Context, r resource) {
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			list := r.list.DeepCopyObject()
			ctx, cancel := context.WithTimeoutCause(ctx, s.answerTimeout, errNoAnswer)
			defer cancel()
			err := because(ctx, s.request(r, &options, r.acceptList).Do(ctx).Into(list))
			s.note(r, err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.Watch = true
			w, err := s.begin(ctx, s.request(r, &options, r.accept))
			// A server that cannot stream what there is refuses this, and is asked for a list then.
			status := apierrors.APIStatus(nil)
			if options.SendInitialEvents == nil || !errors.As(err, &status) {
				s.note(r, err)
			}
			return w, err
		},
	}
	cache.NewReflectorWithOptions(lw, r.kind, r.into, cache.ReflectorOptions{Name: r.name, Backoff: pauses()}).RunWithContext(ctx)
}

// answerTimeout bounds a list, as the API server itself does, and how long a watch may take to begin: a server that
// takes requests and does not answer them, or a proxy before it, would be waited for
// until the watch has its end, many minutes later, or for ever.
const answerTimeout = time.Minute

var errNoAnswer = errors.New("the API server takes requests and does not answer")

// begin begins a watch, if the server answers in time.
func (s *Source) begin(ctx context.Context, request *rest.Request) (watch.Interface, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	late := time.AfterFunc(s.answerTimeout, func() { cancel(errNoAnswer) })
	w, err := request.Watch(ctx)
	if !late.Stop() && err == nil {
		w.Stop()
		err = ctx.Err()
	}
	if err != nil {
		err = because(ctx, err)
		cancel(nil)
		return nil, err
	}
	return begun{w, func() { cancel(nil) }}, nil
}

// begun is a watch that gives its context back at its end.
type begun struct {
	watch.Interface
	done func()
}

// Stop is part of watch.Interface.
func (b begun) Stop() {
	b.Interface.Stop()
	b.done()
}

// because returns errNoAnswer if that is why ctx has ended, else err.
func because(ctx context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(ctx), errNoAnswer) {
		return errNoAnswer
	}
	return err
}

func (s *Source) request(r resource, options *metav1.ListOptions, accept string) *rest.Request {
	options.FieldSelector = r.fields
	request := s.cfg.Client.Get(r.name, options)
	if options.TimeoutSeconds != nil {
		request.Timeout(time.Duration(*options.TimeoutSeconds) * time.Second)
	}
	if accept != "" {
		request.SetHeader("Accept", accept)
	}
	return request
}

// note logs the first failure of a row, each that has another reason in the API server's words than the one before
// (a server that is there by now, and refuses), and the end of it.
func (s *Source) note(r resource, err error) {
	if errors.Is(err, context.Canceled) {
		return
	}
	if err != nil {
		err = apiserver.Explain(err)
	}
	before := r.into.note(err)
	switch {
	case err != nil && (before == nil || apierrors.ReasonForError(before) != apierrors.ReasonForError(err)):
		s.cfg.Logger.Warn("the API server cannot be watched; what is known stays in use", "resource", r.name, "server", s.cfg.Client.Host, "err", err)
	case before != nil && err == nil:
		s.cfg.Logger.Info("the API server is watched again", "resource", r.name)
	case err != nil:
		s.cfg.Logger.Debug("the API server cannot be watched yet", "resource", r.name, "err", err)
	}
}
