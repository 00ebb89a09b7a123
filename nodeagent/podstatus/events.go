// SPDX-License-Identifier: Apache-2.0

package podstatus

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"ambientd/nodeagent/apiserver"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/workload"
)

const (
	// component is what Events are from.
	component = "ambientd"

	// Of one kind of event of one pod, the first is told at once, and those that follow
	// together, once an eventPause. After eventEnd without one, the next is a new first.
	eventPause = time.Minute
	eventEnd   = 10 * time.Minute

	// eventRate bounds the requests of a node for events, eventBurst those at once.
	eventRate  = rate.Limit(5)
	eventBurst = 20

	// eventAttempts is how often an event is tried that the API server does not take.
	eventAttempts = 5

	// maxEvents bounds the kinds of events that are remembered.
	maxEvents = 2048

	// maxMessage is what the API server takes of a message; maxName of an object's name.
	maxMessage = 1024
	maxName    = 253
)

// events tells of what happens to pods.
type events struct {
	cfg   Config
	queue *queue
	limit *rate.Limiter

	mu      sync.Mutex
	known   map[string]*event // by kind: UID and reason
	dropped bool              // that one could not be told has been logged
}

// event is one kind of event of one pod, as often as it has happened.
type event struct {
	pod         workload.Pod
	reason      enroll.Reason
	message     string // the last one
	first, last time.Time
	count       int

	name     string // of the object; empty before it is made
	told     int    // of count
	attempts int    // since the last that succeeded
}

func newEvents(cfg Config) *events {
	return &events{cfg: cfg, queue: newQueue(), limit: rate.NewLimiter(eventRate, eventBurst), known: map[string]*event{}}
}

// add notes that something has happened.
func (e *events) add(pod workload.Pod, reason enroll.Reason, message string) {
	now := time.Now()
	kind := pod.UID + "/" + string(reason)
	e.mu.Lock()
	known, ok := e.known[kind]
	if !ok || now.Sub(known.last) > eventEnd {
		e.expire(now)
		if len(e.known) >= maxEvents {
			e.drop(pod, reason)
			e.mu.Unlock()
			return
		}
		known = &event{pod: workload.Pod{UID: pod.UID, Namespace: pod.Namespace, Name: pod.Name}, reason: reason, first: now}
		e.known[kind] = known
	}
	known.count++
	known.last, known.message = now, shorten(message)
	delay := time.Duration(0)
	if known.told > 0 {
		delay = eventPause
	}
	e.mu.Unlock()
	e.queue.put(kind, delay)
}

// drop logs once that there are more events than can be told. The caller holds mu.
func (e *events) drop(pod workload.Pod, reason enroll.Reason) {
	if !e.dropped {
		e.dropped = true
		e.cfg.Logger.Warn("events of pods are left out, there are too many; the log has all", "pod", pod.String(), "uid", pod.UID, "reason", string(reason))
	}
}

// expire forgets what has not happened for a while. The caller holds mu.
func (e *events) expire(now time.Time) {
	for kind, known := range e.known {
		if now.Sub(known.last) > eventEnd {
			delete(e.known, kind)
		}
	}
}

func (e *events) run(ctx context.Context) { e.queue.run(ctx, 1, e.tell) }

// tell makes or changes the object of one kind of event.
func (e *events) tell(ctx context.Context, kind string) error {
	e.mu.Lock()
	known, ok := e.known[kind]
	if !ok || known.told == known.count {
		e.mu.Unlock()
		return nil
	}
	now := *known
	e.mu.Unlock()
	if err := e.limit.Wait(ctx); err != nil {
		return err
	}
	name, err := e.write(ctx, now)
	e.mu.Lock()
	defer e.mu.Unlock()
	if err == nil {
		known.name, known.told, known.attempts = name, now.count, 0
		return nil
	}
	if known.attempts++; known.attempts < eventAttempts && ctx.Err() == nil {
		e.cfg.Logger.Debug("an event of a pod cannot be written yet", "pod", now.pod.String(), "uid", now.pod.UID, "reason", string(now.reason), "err", err)
		return err
	}
	if ctx.Err() == nil {
		e.cfg.Logger.Warn("an event of a pod is left out", "pod", now.pod.String(), "uid", now.pod.UID, "reason", string(now.reason), "err", err)
	}
	delete(e.known, kind)
	return nil
}

// write returns the name of the object.
func (e *events) write(ctx context.Context, now event) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	if now.name != "" {
		err := e.patch(ctx, now)
		if !apierrors.IsNotFound(err) { // they live for an hour
			return now.name, err
		}
	}
	object := e.object(now)
	err := e.cfg.Client.Post().Namespace(now.pod.Namespace).Resource("events").Body(object).Do(ctx).Error()
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) || apierrors.IsNotFound(err) {
		return object.Name, nil // nobody looks there any more
	}
	if err != nil {
		return "", fmt.Errorf("making an event: %w", apiserver.Explain(err))
	}
	return object.Name, nil
}

func (e *events) patch(ctx context.Context, now event) error {
	body, err := json.Marshal(map[string]any{"count": now.count, "lastTimestamp": metav1.NewTime(now.last), "message": now.message})
	if err != nil {
		return err
	}
	err = e.cfg.Client.Patch(types.MergePatchType).Namespace(now.pod.Namespace).Resource("events").Name(now.name).Body(body).Do(ctx).Error()
	if err != nil {
		return fmt.Errorf("changing an event: %w", apiserver.Explain(err))
	}
	return nil
}

func (e *events) object(now event) *corev1.Event {
	kind := corev1.EventTypeWarning
	if now.reason == enroll.ReasonEnrolled || now.reason == enroll.ReasonRepaired {
		kind = corev1.EventTypeNormal
	}
	suffix := fmt.Sprintf(".%x", now.first.UnixNano())
	return &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: now.pod.Namespace,
			Name:      strings.TrimRight(now.pod.Name[:min(len(now.pod.Name), maxName-len(suffix))], ".-") + suffix,
		},
		InvolvedObject: corev1.ObjectReference{
			APIVersion: "v1", Kind: "Pod", Namespace: now.pod.Namespace, Name: now.pod.Name, UID: types.UID(now.pod.UID),
		},
		Type: kind, Reason: string(now.reason), Message: now.message,
		FirstTimestamp: metav1.NewTime(now.first), LastTimestamp: metav1.NewTime(now.last), Count: int32(now.count),
		Source:              corev1.EventSource{Component: component, Host: e.cfg.Node},
		ReportingController: component, ReportingInstance: e.cfg.Node,
	}
}

// shorten makes a message one that the API server takes: not too long, and nothing in it
// that is no text.
func shorten(message string) string {
	if len(message) > maxMessage {
		const more = "…"
		message = strings.ToValidUTF8(message[:maxMessage-len(more)], "") + more
	}
	return strings.ToValidUTF8(message, "?")
}
