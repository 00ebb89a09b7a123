// SPDX-License-Identifier: Apache-2.0

package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// The descriptors that Start hands to the init process.
const (
	ordersFD = 3
	answerFD = 4
)

// ready is what the init process answers when all is prepared; anything else is why not.
const ready = "ready"

// Init is the init process of a node: it prepares the node, says so, and then starts and
// reaps processes until it is killed. It returns only what kept it from that.
func Init() error {
	orders, answer := os.NewFile(ordersFD, "orders"), os.NewFile(answerFD, "answer")
	if os.Getpid() != 1 || orders == nil || answer == nil {
		return fmt.Errorf("%s is for devcluster itself", InitCommand)
	}
	unix.CloseOnExec(ordersFD)
	unix.CloseOnExec(answerFD)
	var cfg Config
	// Whoever started this process sends the configuration once it has written down that this
	// process exists. If it ended before, there is nothing to do.
	if err := json.NewDecoder(orders).Decode(&cfg); err != nil {
		return fmt.Errorf("reading what to prepare: %w", err)
	}
	orders.Close()
	listener, err := prepare(cfg)
	if err != nil {
		fmt.Fprintln(answer, err)
		return err
	}
	children := make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)
	fmt.Fprintln(answer, ready)
	answer.Close()

	var s supervisor
	go func() {
		for range children {
			s.reap()
		}
	}()
	for {
		conn, err := listener.Accept()
		if err != nil {
			return fmt.Errorf("accepting on the control socket: %w", err)
		}
		go s.serve(conn)
	}
}

// prepare makes the node's view of the machine, and listens on the control socket.
func prepare(cfg Config) (net.Listener, error) {
	// The socket lies where the machine and the node both see it; listen before the mounts.
	listener, err := net.Listen("unix", cfg.Control) //nolint:noctx // a unix socket does not wait
	if err != nil {
		return nil, fmt.Errorf("listening on the control socket: %w", err)
	}
	if err := os.Chmod(cfg.Control, 0o600); err != nil {
		return nil, fmt.Errorf("closing the control socket for others: %w", err)
	}
	if err := unix.Sethostname([]byte(cfg.Hostname)); err != nil {
		return nil, fmt.Errorf("setting the host name: %w", err)
	}
	if err := mountAll(cfg); err != nil {
		return nil, err
	}
	return listener, nil
}

func mountAll(cfg Config) error {
	// First out of the machine's propagation, so that nothing mounted here is seen there; then
	// shared, because kubelet's and the runtime's mounts must reach containers.
	for _, flags := range []uintptr{unix.MS_REC | unix.MS_PRIVATE, unix.MS_REC | unix.MS_SHARED} {
		if err := unix.Mount("", "/", "", flags, ""); err != nil {
			return fmt.Errorf("changing the propagation of mounts: %w", err)
		}
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mounting /proc: %w", err)
	}
	for _, o := range cfg.Overlays {
		options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", o.Target, o.Upper, o.Work)
		if err := errors.Join(os.MkdirAll(o.Upper, 0o755), os.MkdirAll(o.Work, 0o700)); err != nil {
			return fmt.Errorf("making a layer over %s: %w", o.Target, err)
		}
		if err := unix.Mount("devcluster", o.Target, "overlay", 0, options); err != nil {
			return fmt.Errorf("mounting a layer over %s: %w", o.Target, err)
		}
	}
	for _, b := range cfg.Binds {
		if err := bind(b); err != nil {
			return err
		}
	}
	return nil
}

// bind mounts b, whose target may have to be made first, in an overlay or below another bind.
func bind(b Bind) error {
	source, err := os.Stat(b.Source)
	if err != nil {
		return fmt.Errorf("mounting at %s: %w", b.Target, err)
	}
	if source.IsDir() {
		err = os.MkdirAll(b.Target, 0o755)
	} else if _, missing := os.Stat(b.Target); missing != nil {
		if err = os.MkdirAll(filepath.Dir(b.Target), 0o755); err == nil {
			err = os.WriteFile(b.Target, nil, 0o644)
		}
	}
	if err != nil {
		return fmt.Errorf("making the mount point %s: %w", b.Target, err)
	}
	if err := unix.Mount(b.Source, b.Target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mounting %s at %s: %w", b.Source, b.Target, err)
	}
	return nil
}
