// SPDX-License-Identifier: Apache-2.0

//go:build apitest

package onkubernetes

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"ambientd/cni-plugin/podevent"
)

// mostAttempts is how often the start of a pod is tried; an agent that was killed is away for
// less than a second.
const mostAttempts = 60

// life is a place on the node for one pod after the other, with what kubelet and the
// runtime do for it. One thing at a time happens to it.
type life struct {
	s      *soak
	number int
	ip     netip.Addr
	path   string // of the netns

	mu       sync.Mutex
	pods     int // that it has had
	pod      *corev1.Pod
	sandbox  string
	netns    *os.File
	ended    bool // a Job's pod that has succeeded
	labelled bool // out of the mesh by its own label
}

func newLife(s *soak, number int) *life {
	return &life{
		s: s, number: number, ip: netip.AddrFrom4([4]byte{10, 20, byte(number >> 8), byte(number)}),
		path: filepath.Join("/run/netns", fmt.Sprintf("cni-%s-%d", s.namespace, number)),
	}
}

// inMesh tells whether the pod should be. The caller holds mu, or is alone.
func (l *life) inMesh() bool {
	return l.pod != nil && !l.ended && !l.labelled && l.pod.Namespace != l.s.outside
}

// turn ends the pod that is there and starts another.
func (l *life) turn(ctx context.Context) error {
	if err := l.end(ctx); err != nil {
		return err
	}
	return l.begin(ctx)
}

// begin is the start of a pod: its object, its netns, and ADD until it succeeds.
func (l *life) begin(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pod != nil {
		return nil
	}
	l.pods++
	namespace := []string{l.s.namespace, l.s.namespace, l.s.flipping, l.s.outside}[rand.IntN(4)]
	var err error
	l.pod, err = l.s.admin.CoreV1().Pods(namespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("pod-%d-%d", l.number, l.pods)},
		Spec: corev1.PodSpec{
			NodeName: l.s.node, ServiceAccountName: fmt.Sprint("sa-", rand.IntN(accounts)),
			Containers: []corev1.Container{{Name: "app", Image: "app"}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("making a pod: %w", err)
	}
	l.ended, l.labelled = false, false
	for attempt := 1; ; attempt++ {
		l.sandbox = fmt.Sprintf("%s-%d", l.pod.UID, attempt)
		if l.netns, err = l.makeNetns(); err != nil {
			return err
		}
		reply, err := l.call(ctx, podevent.CommandAdd, 20*time.Second)
		if err == nil && reply.Error == nil {
			break
		}
		again := true
		if err == nil {
			err, again = reply.Error, reply.Error.Code == podevent.CodeTryAgain
		}
		if !again || attempt == mostAttempts {
			return fmt.Errorf("ADD of %s/%s: attempt %d: %w", l.pod.Namespace, l.pod.Name, attempt, err)
		}
		// The agent is away: the runtime tears the sandbox down, and kubelet has another made.
		if err := l.tearDown(ctx); err != nil {
			return err
		}
		pause(ctx, 500*time.Millisecond)
	}
	return l.setPhase(ctx, corev1.PodRunning)
}

// end is the end of the pod, in one of the orders in which it comes.
func (l *life) end(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pod == nil {
		return nil
	}
	var err error
	switch rand.IntN(4) {
	case 0: // of a Job: its object stays for a while
		l.ended = true
		err = errors.Join(l.setPhase(ctx, corev1.PodSucceeded), l.tearDown(ctx), l.remove(ctx, 0))
	case 1: // by force: the object is gone before kubelet knows
		err = errors.Join(l.remove(ctx, 0), l.tearDown(ctx))
	default:
		err = errors.Join(l.remove(ctx, 30), l.tearDown(ctx), l.remove(ctx, 0))
	}
	l.pod = nil
	return err
}

// relabel takes the pod out of the mesh, or back in, by its own label.
func (l *life) relabel(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pod == nil || l.ended {
		return nil
	}
	value := `"none"`
	if l.labelled {
		value = "null"
	}
	patch := fmt.Sprintf(`{"metadata": {"labels": {"istio.io/dataplane-mode": %s}}}`, value)
	_, err := l.s.admin.CoreV1().Pods(l.pod.Namespace).Patch(ctx, l.pod.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	if err == nil {
		l.labelled = !l.labelled
	}
	return err
}

func (l *life) setPhase(ctx context.Context, phase corev1.PodPhase) error {
	patch := fmt.Sprintf(`{"status": {"phase": %q, "podIP": %q, "podIPs": [{"ip": %q}]}}`, phase, l.ip, l.ip)
	_, err := l.s.admin.CoreV1().Pods(l.pod.Namespace).Patch(ctx, l.pod.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
	return err
}

func (l *life) remove(ctx context.Context, grace int64) error {
	err := l.s.admin.CoreV1().Pods(l.pod.Namespace).Delete(ctx, l.pod.Name, metav1.DeleteOptions{GracePeriodSeconds: &grace})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// call is what the plugin does.
func (l *life) call(ctx context.Context, command string, timeout time.Duration) (podevent.Reply, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return podevent.Call(ctx, l.s.cfg.CNISocketPath(), l.request(command), l.netns)
}

func (l *life) request(command string) podevent.Request {
	req := podevent.Request{
		Command: command, Network: "net", ContainerID: l.sandbox, IfName: "eth0", NetnsPath: l.path,
		Pod: podevent.Pod{Namespace: l.pod.Namespace, Name: l.pod.Name, UID: string(l.pod.UID)},
	}
	if command == podevent.CommandAdd {
		req.IPs = []netip.Addr{l.ip}
	}
	return req
}

// tearDown is the end of the sandbox: the loopback plugin, our plugin, which leaves a
// DEL that nobody takes in the spool, and the netns itself. The runtime repeats the DEL.
func (l *life) tearDown(ctx context.Context) error {
	err := inside(l.netns, func() error { return loopback(netlink.LinkSetDown) })
	for range 2 {
		if _, callErr := l.call(ctx, podevent.CommandDel, 900*time.Millisecond); callErr != nil {
			err = errors.Join(err, podevent.Spool(l.s.cfg.RunDir+podevent.SpoolInRunDir, l.request(podevent.CommandDel)))
		}
	}
	return errors.Join(err, unix.Unmount(l.path, unix.MNT_DETACH), os.Remove(l.path), l.netns.Close())
}

// makeNetns makes a netns with the pod's address, and a file of it, as the runtime does.
func (l *life) makeNetns() (*os.File, error) {
	var netns *os.File
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("making a netns: %w", err)
		}
		err := loopback(func(lo netlink.Link) error {
			prefix := netip.PrefixFrom(l.ip, 32)
			return errors.Join(netlink.LinkSetUp(lo), netlink.AddrAdd(lo, &netlink.Addr{IPNet: netlink.NewIPNet(prefix.Addr().AsSlice())}))
		})
		if err != nil {
			return err
		}
		netns, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(l.path, nil, 0o600); err != nil {
		return nil, errors.Join(err, netns.Close())
	}
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", netns.Fd()), l.path, "", unix.MS_BIND, ""); err != nil {
		return nil, errors.Join(fmt.Errorf("mounting the netns at %s: %w", l.path, err), netns.Close())
	}
	return netns, nil
}

// loopback does something to the loopback device of the thread's netns.
func loopback(do func(netlink.Link) error) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("looking for the loopback device: %w", err)
	}
	return do(lo)
}

// inside calls f on a thread inside of the netns.
func inside(netns *os.File, f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(netns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("entering a netns: %w", err)
		}
		return f()
	})
}

// onThread calls f on a thread that ends with it, wherever f has taken it.
func onThread(f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked
		result <- f()
	}()
	return <-result
}
