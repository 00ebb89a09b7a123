// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
)

// logs holds what `kubectl logs --follow` shows of the agents, the proxies and the tests'
// clients, each container from its start: kubelet keeps but two of them.
type logs struct {
	client kubernetes.Interface
	news   *news

	mu      sync.Mutex
	streams []*stream // in the order in which containers were seen
	seen    map[string]bool
}

// stream is one container's.
type stream struct {
	namespace, pod, container, node string
	lines                           []string
	err                             error // that ended it early
}

func newLogs(c *cluster) *logs {
	return &logs{client: c.client, news: c.news, seen: map[string]bool{}}
}

// follow begins to follow the containers of the pod that are new.
func (l *logs) follow(ctx context.Context, pod *corev1.Pod) {
	if pod.Namespace != systemNamespace && pod.Labels[roleLabel] != roleClient {
		return
	}
	for _, status := range append(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses...) {
		if status.ContainerID == "" || status.State.Waiting != nil || l.known(status.ContainerID) {
			continue
		}
		s := &stream{namespace: pod.Namespace, pod: pod.Name, container: status.Name, node: pod.Spec.NodeName}
		l.mu.Lock()
		l.streams = append(l.streams, s)
		l.mu.Unlock()
		go l.read(ctx, s)
	}
}

func (l *logs) known(container string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	known := l.seen[container]
	l.seen[container] = true
	return known
}

func (l *logs) read(ctx context.Context, s *stream) {
	options := &corev1.PodLogOptions{Container: s.container, Follow: true}
	body, err := l.client.CoreV1().Pods(s.namespace).GetLogs(s.pod, options).Stream(ctx)
	if err == nil {
		defer body.Close()
		reader := bufio.NewReader(body)
		for {
			var line string
			line, err = reader.ReadString('\n')
			if err != nil {
				break
			}
			l.mu.Lock()
			s.lines = append(s.lines, strings.TrimSuffix(line, "\n"))
			l.mu.Unlock()
			l.news.tell()
		}
	}
	if err == io.EOF { //nolint:errorlint // a reader returns it as it is
		return
	}
	l.mu.Lock()
	s.err = err
	l.mu.Unlock()
}

// lines returns those of a container of a pod, of all its starts.
func (l *logs) lines(namespace, pod, container string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var lines []string
	for _, s := range l.streams {
		if s.namespace == namespace && s.pod == pod && s.container == container {
			lines = append(lines, s.lines...)
		}
	}
	return lines
}

// onNode returns those of a container of ambientd's own pods on a node.
func (l *logs) onNode(container, node string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var lines []string
	for _, s := range l.streams {
		if s.namespace == systemNamespace && s.container == container && s.node == node {
			lines = append(lines, s.lines...)
			if s.err != nil {
				lines = append(lines, fmt.Sprintf("(following %s of %s has ended: %v)", s.container, s.pod, s.err))
			}
		}
	}
	return lines
}

// connection is what the proxy says of one that it has carried or refused.
type connection struct{ direction, protocol, source, destination, from, to, err string }

// connections returns those that the node's proxy tells of.
func (l *logs) connections(node string) []connection {
	var found []connection
	for _, raw := range l.onNode("devproxy", node) {
		line, err := ParseLine(raw)
		if err != nil || line["msg"] != "connection" {
			continue
		}
		found = append(found, connection{
			direction: line["direction"], protocol: line["protocol"], source: line["src"], destination: line["dst"],
			from: line["source_identity"], to: line["destination_identity"], err: line["err"],
		})
	}
	return found
}
