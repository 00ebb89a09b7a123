// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
	"ambientd/nodeagent/admin"
)

// node is one of the cluster's, as this machine sees it.
type node struct {
	name string
	root string // its file system, through the process that it lives by
}

func (n node) private(name string) string {
	return filepath.Join(n.root, "run/ambientd/private", name)
}

// status asks the node's agent, as `ambientd status --json` does.
func (n node) status(ctx context.Context) (admin.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return admin.Fetch(ctx, n.private("admin.sock"))
}

// statuses asks the agents of all nodes.
func (c *cluster) statuses(ctx context.Context) (map[string]admin.Status, error) {
	all := map[string]admin.Status{}
	for _, n := range c.nodes {
		status, err := n.status(ctx)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", n.name, err)
		}
		all[n.name] = status
	}
	return all, nil
}

// agentReady says why the node's agent is not, or not one that was started after that time.
func (n node) agentReady(ctx context.Context, after time.Time) error {
	status, err := n.status(ctx)
	switch {
	case err != nil:
		return err
	case !status.Started.After(after):
		return fmt.Errorf("%s: the agent was started at %s", n.name, status.Started)
	case !status.Ready:
		return fmt.Errorf("%s: the agent is not ready", n.name)
	case len(status.Proxies) != 1 || !status.Proxies[0].Ready:
		return fmt.Errorf("%s: the agent has the proxies %+v", n.name, status.Proxies)
	}
	return nil
}

// killAgent kills the node's agent with SIGKILL. The socket tells which process listens.
func (n node) killAgent(t *testing.T) {
	t.Helper()
	conn, err := new(net.Dialer).DialContext(t.Context(), "unix", n.private("admin.sock"))
	must(t, err)
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	must(t, err)
	var peer *unix.Ucred
	var optErr error
	must(t, raw.Control(func(fd uintptr) { peer, optErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }))
	must(t, optErr)
	process, err := os.FindProcess(int(peer.Pid))
	must(t, err)
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", peer.Pid))
	must(t, err)
	if got := strings.TrimSpace(string(name)); got != "ambientd" {
		t.Fatalf("%s: %s (process %d) listens at the agent's socket", n.name, got, peer.Pid)
	}
	must(t, process.Kill())
	t.Logf("%s: killed the agent, process %d", n.name, peer.Pid)
}

// podNetns returns the file of the netns in which a pod has the address.
func (n node) podNetns(address string) (string, error) {
	files, err := filepath.Glob(filepath.Join(n.root, "run/netns/*"))
	if err != nil {
		return "", err
	}
	for _, file := range files {
		var addresses []net.Addr
		err := inNetns(file, func() (err error) {
			addresses, err = net.InterfaceAddrs()
			return err
		})
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return "", err
		}
		for _, a := range addresses {
			if ip, ok := a.(*net.IPNet); ok && ip.IP.String() == address {
				return file, nil
			}
		}
	}
	return "", fmt.Errorf("%s: no netns among %d has the address %s", n.name, len(files), address)
}

// inNetns calls f on a thread inside of the netns, and ends that thread.
func inNetns(file string, f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		fd, err := unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			result <- &os.PathError{Op: "open", Path: file, Err: err}
			return
		}
		defer unix.Close(fd)
		if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
			result <- fmt.Errorf("entering %s: %w", file, err)
			return
		}
		result <- f()
	}()
	return <-result
}

// redirected returns what of the redirection is in the netns: rules, policy rules and routes.
func redirected(ctx context.Context, file string) (parts []string, err error) {
	table := fmt.Sprint(redirection.RouteTable)
	for _, look := range []struct {
		command []string
		sign    string
	}{
		{[]string{"nft", "list", "tables"}, "table"},
		{[]string{"ip", "-4", "rule"}, "lookup " + table},
		{[]string{"ip", "-6", "rule"}, "lookup " + table},
		{[]string{"ip", "-4", "route", "show", "table", "all", "type", "local"}, "table " + table},
		{[]string{"ip", "-6", "route", "show", "table", "all", "type", "local"}, "table " + table},
	} {
		var out []byte
		err := inNetns(file, func() (err error) {
			out, err = exec.CommandContext(ctx, look.command[0], look.command[1:]...).CombinedOutput()
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("running %s in a pod's netns: %w: %s", strings.Join(look.command, " "), err, out)
		}
		for line := range strings.Lines(string(out)) {
			if strings.Contains(line, look.sign) {
				parts = append(parts, strings.TrimSpace(line))
			}
		}
	}
	return parts, nil
}
