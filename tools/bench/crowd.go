// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"

	"ambientd/nodeagent/podnetns"
	"ambientd/tools/enclave"
)

// crowdSize says how many pods run on a node, and how many processes.
type crowdSize struct {
	members, bystanders int // pods
	perPod              int // processes in each
	host                int // processes in the host's netns
}

// fullCrowd is as large as that of the figures that are to be beaten.
func fullCrowd() crowdSize { return crowdSize{members: 100, bystanders: 150, perPod: 4, host: 100} }

func (s crowdSize) pods() int      { return s.members + s.bystanders }
func (s crowdSize) processes() int { return s.pods()*s.perPod + s.host }

// crowd is a node on which pods run: each has a netns with its addresses, and processes
// in it.
type crowd struct {
	size crowdSize
	// proc is where the processes show, with cgroups that they do not really have: making
	// those takes more rights than a user namespace gives.
	proc string
	pods []crowdPod

	life      *os.File // what the processes read; they end when nobody can write to it
	holdsLife *os.File
	processes []*exec.Cmd
}

type crowdPod struct {
	kind   kind
	number int
	ips    []netip.Addr
	netns  *enclave.Netns
}

func (p crowdPod) uid() string { return p.kind.pod(p.number).UID }

// newCrowd makes a crowd.
func newCrowd(ctx context.Context, size crowdSize) (c *crowd, err error) {
	c = &crowd{size: size}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.disperse())
		}
	}()
	// A tmpfs costs more like procfs than a disk does.
	if c.proc, err = os.MkdirTemp("/run", "proc-"); err != nil {
		return c, fmt.Errorf("making a directory of processes: %w", err)
	}
	if c.life, c.holdsLife, err = os.Pipe(); err != nil {
		return c, fmt.Errorf("making the pipe that processes live by: %w", err)
	}
	for range size.host {
		if err := c.populate(ctx, func(fn func() error) error { return fn() }, "/system.slice/sshd.service"); err != nil {
			return c, err
		}
	}
	for i := range size.members {
		if err := c.addPod(ctx, member, i); err != nil {
			return c, err
		}
	}
	for i := range size.bystanders {
		if err := c.addPod(ctx, bystander, i); err != nil {
			return c, err
		}
	}
	return c, nil
}

func (c *crowd) addPod(ctx context.Context, k kind, number int) error {
	pod := crowdPod{kind: k, number: number, ips: podAddresses(len(c.pods) + 1)}
	var err error
	if pod.netns, err = enclave.MakeNetns("cni-" + k.pod(number).Name); err != nil {
		return err
	}
	c.pods = append(c.pods, pod)
	if err := pod.netns.Do(func() error { return errors.Join(loopbackUp(), addToLoopback(pod.ips)) }); err != nil {
		return err
	}
	for range c.size.perPod {
		if err := c.populate(ctx, pod.netns.Do, podCgroup(pod.uid())); err != nil {
			return err
		}
	}
	return nil
}

// populate starts a process inside a netns and shows it in a cgroup.
func (c *crowd) populate(ctx context.Context, inside func(func() error) error, cgroup string) error {
	cmd := exec.CommandContext(context.WithoutCancel(ctx), "cat")
	cmd.Stdin = c.life
	if err := inside(cmd.Start); err != nil {
		return fmt.Errorf("starting a pod's process: %w", err)
	}
	c.processes = append(c.processes, cmd)
	dir := filepath.Join(c.proc, strconv.Itoa(cmd.Process.Pid))
	err := os.Mkdir(dir, 0o755)
	if err == nil {
		err = os.Symlink(fmt.Sprintf("/proc/%d/ns", cmd.Process.Pid), filepath.Join(dir, "ns"))
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "cgroup"), []byte("0::"+cgroup+"\n"), 0o644)
	}
	if err != nil {
		return fmt.Errorf("showing a process: %w", err)
	}
	return nil
}

// wanted is what a finder is asked for.
func (c *crowd) wanted() []podnetns.Wanted {
	wanted := make([]podnetns.Wanted, 0, len(c.pods))
	for _, pod := range c.pods {
		wanted = append(wanted, podnetns.Wanted{UID: pod.uid(), IPs: pod.ips})
	}
	return wanted
}

// disperse ends the processes and takes the network namespaces away.
func (c *crowd) disperse() error {
	var errs []error
	for _, end := range []*os.File{c.holdsLife, c.life} {
		if end != nil {
			errs = append(errs, end.Close())
		}
	}
	for _, cmd := range c.processes {
		errs = append(errs, cmd.Wait())
	}
	for _, pod := range c.pods {
		errs = append(errs, pod.netns.Remove())
	}
	if c.proc != "" {
		errs = append(errs, os.RemoveAll(c.proc))
	}
	return errors.Join(errs...)
}

// podAddresses are of both families.
func podAddresses(number int) []netip.Addr {
	high, low := byte(number>>8), byte(number)
	return []netip.Addr{
		netip.AddrFrom4([4]byte{10, 88, high, low}),
		netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x88, 14: high, 15: low}),
	}
}

// addToLoopback gives the netns of the calling thread addresses, on the interface that
// it has anyway.
func addToLoopback(addrs []netip.Addr) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("looking up lo: %w", err)
	}
	for _, addr := range addrs {
		if err := netlink.AddrAdd(lo, &netlink.Addr{IPNet: netlink.NewIPNet(addr.AsSlice())}); err != nil {
			return fmt.Errorf("adding address %s: %w", addr, err)
		}
	}
	return nil
}

// podCgroup is what containerd and the systemd driver make for a container of the pod.
func podCgroup(uid string) string {
	return "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + strings.ReplaceAll(uid, "-", "_") +
		".slice/cri-containerd-771dc945d8ef33320eb739394c08f1c5818a4cd1741bc7a6d63e98e9d6ca1538.scope"
}
