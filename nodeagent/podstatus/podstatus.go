// SPDX-License-Identifier: Apache-2.0

// Package podstatus owns what the agent writes on pods' objects: the annotation by which
// others learn that a pod is in the mesh, and Events for whoever looks at the pod.
//
// All of it happens later than what it tells of: nobody waits for the API server, and
// while that is away pods start and end as ever. It refuses to tell anybody what an
// annotation says: that would be believing it.
package podstatus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"ambientd/nodeagent/apiserver"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/workload"
)

const (
	// writers bounds how many pods are written at the same time.
	writers = 4

	// writeTimeout bounds one request.
	writeTimeout = 5 * time.Second

	// startDelay is how much later than what it tells of a pod is written. Whoever waits for the pod,
	// a plugin that has its reply and is about to end, needs the processor more than the request does.
	startDelay = 50 * time.Millisecond

	// leavingDelay is how much later a pod that is being deleted is written. Its object
	// is gone by then, as a rule, which saves the request.
	leavingDelay = 2 * time.Second

	// watchDelay is how long what has been written counts, whatever the pod that is
	// watched shows.
	watchDelay = time.Minute
)

// Known finds a pod as it was seen last; false if it is not known, or gone.
type Known func(namespace, name, uid string) (workload.Pod, bool)

// Config is what a Writer needs; every field is required.
type Config struct {
	Client *apiserver.Client
	Node   string // that Events are from
	Known  Known
	Logger *slog.Logger
}

// Writer is an [enroll.Reporter] that writes on pods' objects. It is safe for concurrent
// use.
type Writer struct {
	cfg    Config
	queue  *queue
	events *events

	mu      sync.Mutex
	wanted  map[string]wish    // by UID: what is to be written
	written map[string]written // by UID: what was of late, which the pods watched may not show yet
	failing bool               // the last request failed
}

var _ enroll.Reporter = (*Writer)(nil)

// wish is what a pod's object should show.
type wish struct {
	namespace, name string
	state           enroll.State
}

// written is what was written last.
type written struct {
	state enroll.State
	at    time.Time
}

// New returns a Writer that writes once Run is called.
func New(cfg Config) (*Writer, error) {
	if cfg.Client == nil || cfg.Node == "" || cfg.Known == nil || cfg.Logger == nil {
		return nil, errors.New("podstatus: client, node, known pods and logger are required")
	}
	return &Writer{
		cfg: cfg, queue: newQueue(), events: newEvents(cfg), wanted: map[string]wish{}, written: map[string]written{},
	}, nil
}

// Run writes until ctx ends, and then returns nil.
func (w *Writer) Run(ctx context.Context) error {
	ctx = apiserver.WithLog(ctx, w.cfg.Logger)
	var both sync.WaitGroup
	both.Go(func() { w.queue.run(ctx, writers, w.write) })
	both.Go(func() { w.events.run(ctx) })
	both.Wait()
	return nil
}

// Event is part of enroll.Reporter.
func (w *Writer) Event(pod workload.Pod, reason enroll.Reason, message string) {
	w.events.add(pod, reason, message)
}

// State is part of enroll.Reporter. What the pod shows already, or has just been told,
// costs nothing.
func (w *Writer) State(pod workload.Pod, state enroll.State) {
	w.mu.Lock()
	w.wanted[pod.UID] = wish{namespace: pod.Namespace, name: pod.Name, state: state}
	idle := !w.needsWriting(pod.UID)
	if idle {
		w.forget(pod.UID)
	}
	w.mu.Unlock()
	if idle {
		return
	}
	delay := startDelay
	if known, ok := w.cfg.Known(pod.Namespace, pod.Name, pod.UID); ok && known.Deleting && state == enroll.StateOut {
		delay = leavingDelay
	}
	if !w.queue.put(pod.UID, delay) {
		w.cfg.Logger.Warn("a pod's annotation is not kept up to date, too many others wait for the API server", "pod", pod.String(), "uid", pod.UID)
		w.mu.Lock()
		w.forget(pod.UID)
		w.mu.Unlock()
	}
}

// needsWriting tells whether the pod's object has to be changed for it to show what it
// should. The caller holds mu.
func (w *Writer) needsWriting(uid string) bool {
	want, ok := w.wanted[uid]
	if !ok {
		return false
	}
	pod, ok := w.cfg.Known(want.namespace, want.name, uid)
	if !ok {
		return false // gone; or not known yet, then the next audit tells of it again
	}
	shown := enroll.State(pod.Annotations[workload.AnnotationRedirection])
	if last, ok := w.written[uid]; ok && time.Since(last.at) < watchDelay {
		shown = last.state
	}
	switch {
	case want.state == enroll.StateOut:
		return shown != "" && shown != enroll.StateOut
	case want.state == enroll.StatePending && shown == enroll.StateEnabled:
		return false // an agent's restart is no reason to have traffic go around the mesh
	}
	return shown != want.state
}

// forget lets go of what is wanted of the pod, because its object shows it or is gone. The
// caller holds mu.
func (w *Writer) forget(uid string) { delete(w.wanted, uid) }

// noteWritten notes what was written, and forgets what has shown since. The caller holds
// mu.
func (w *Writer) noteWritten(uid string, state enroll.State) {
	for uid, last := range w.written {
		if time.Since(last.at) >= watchDelay {
			delete(w.written, uid)
		}
	}
	w.written[uid] = written{state: state, at: time.Now()}
}

// write makes the pod's object show what it should.
func (w *Writer) write(ctx context.Context, uid string) error {
	w.mu.Lock()
	want, needed := w.wanted[uid], w.needsWriting(uid)
	if !needed {
		w.forget(uid)
	}
	w.mu.Unlock()
	if !needed {
		return nil
	}
	err := w.patch(ctx, uid, want)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.tellFailure(ctx, uid, want, err)
		return err
	}
	w.failing = false
	w.noteWritten(uid, want.state)
	if w.wanted[uid] == want {
		w.forget(uid)
	}
	return nil
}

// tellFailure logs the first failure of a row: all pods have the same, as a rule. The
// caller holds mu.
func (w *Writer) tellFailure(ctx context.Context, uid string, want wish, err error) {
	level := slog.LevelWarn
	if w.failing || ctx.Err() != nil {
		level = slog.LevelDebug
	}
	w.failing = true
	w.cfg.Logger.Log(ctx, level, "pods' annotations cannot be written, they are tried again", "pod", want.namespace+"/"+want.name, "uid", uid, "err", err)
}

// patch changes nothing of the pod but the one annotation, and nothing at all of another
// pod of that name.
func (w *Writer) patch(ctx context.Context, uid string, want wish) error {
	type metadata struct {
		UID         string             `json:"uid"`
		Annotations map[string]*string `json:"annotations"`
	}
	value := (*string)(nil) // null, which takes it out
	if want.state != enroll.StateOut {
		value = new(string(want.state))
	}
	body, err := json.Marshal(map[string]metadata{"metadata": {UID: uid, Annotations: map[string]*string{workload.AnnotationRedirection: value}}})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	err = w.cfg.Client.Patch(types.MergePatchType).Namespace(want.namespace).Resource(string(corev1.ResourcePods)).Name(want.name).
		SubResource("status").SetHeader("Accept", apiserver.PartialMetadata).Body(body).Do(ctx).Error()
	if apierrors.IsNotFound(err) || isOfAnother(err) {
		return nil // it is gone, and another one of that name may be there
	}
	if err != nil {
		return fmt.Errorf("patching the pod's status: %w", apiserver.Explain(err))
	}
	return nil
}

// isOfAnother tells whether the API server refused to change the UID, which the patch
// would do to another pod of that name.
func isOfAnother(err error) bool {
	if apierrors.IsConflict(err) {
		return true
	}
	status := apierrors.APIStatus(nil)
	if !errors.As(err, &status) || !apierrors.IsInvalid(err) || status.Status().Details == nil {
		return false
	}
	return slices.ContainsFunc(status.Status().Details.Causes, func(c metav1.StatusCause) bool { return c.Field == "metadata.uid" })
}
