// SPDX-License-Identifier: Apache-2.0

package zdstest

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Cookie returns the cookie of a network namespace (SO_NETNS_COOKIE, Linux
// 5.14). Only a socket made inside tells it, so a thread goes there and back;
// this needs CAP_SYS_ADMIN over the netns.
func Cookie(netns *os.File) (uint64, error) {
	type result struct {
		cookie uint64
		err    error
	}
	done := make(chan result)
	// A goroutine of its own, so that a thread that cannot get back dies with it.
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The main thread stays: /proc/self/ns/net is its netns. Held here,
			// it is not the thread that the next goroutine gets.
			cookie, err := Cookie(netns)
			runtime.UnlockOSThread()
			done <- result{cookie, err}
			return
		}
		cookie, err := cookieOnThread(netns)
		done <- result{cookie, err}
	}()
	r := <-done
	return r.cookie, r.err
}

// cookieOnThread unlocks the thread exactly if it is at home again.
func cookieOnThread(netns *os.File) (cookie uint64, err error) {
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return 0, fmt.Errorf("opening the test's own netns: %w", err)
	}
	defer home.Close()
	if err := unix.Setns(int(netns.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return 0, fmt.Errorf("entering the netns that was passed: %w", err)
	}
	cookie, err = ownCookie()
	if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
		return 0, errors.Join(err, fmt.Errorf("returning to the test's own netns: %w", back))
	}
	runtime.UnlockOSThread()
	return cookie, err
}

func ownCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, os.NewSyscallError("getsockopt SO_NETNS_COOKIE", err)
	}
	return cookie, nil
}
