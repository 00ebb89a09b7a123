// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
)

// Netns is a verified network namespace, held open by a descriptor, with the
// netlink sockets that were opened in it. Its methods are safe for concurrent use.
type Netns struct {
	file *os.File
	home *os.File // where threads return to; owned by Host
	key  Key
	kept rawnetlink.Kept
}

// Key names the netns.
func (n *Netns) Key() Key { return n.key }

// File returns the descriptor for handing the netns to another process. It
// stays the Netns' own: the caller does not close it, and does not use it after
// [Netns.Close].
func (n *Netns) File() *os.File { return n.file }

// Kept returns the sockets that stay open as long as the Netns does. It makes a
// Netns a [rawnetlink.Keeper].
func (n *Netns) Kept() *rawnetlink.Kept { return &n.kept }

// Close gives the descriptor and the kept sockets back; a second Close does
// nothing. A Do that has already entered the netns finishes unharmed, a later one
// returns an error that wraps [os.ErrClosed].
func (n *Netns) Close() error {
	err := n.kept.Close()
	if closeErr := n.file.Close(); !errors.Is(closeErr, os.ErrClosed) {
		err = errors.Join(err, closeErr)
	}
	if err != nil {
		return fmt.Errorf("closing netns %s: %w", n.key, err)
	}
	return nil
}

// Do runs fn inside the netns and returns its error. Sockets that fn opens stay
// in the netns and may be used afterwards from any thread; goroutines that fn
// starts are outside.
//
// fn runs in a goroutine of its own on a locked thread, because a thread that
// cannot return to the host's netns must die, and the caller's could not: then
// Do's error says so, and no other goroutine ever runs in the wrong netns. A
// panic in fn continues in the caller as a [*PanicError], and a
// [runtime.Goexit] ends the caller too, both after the thread has returned.
//
// It costs about 6 µs, half of it for the two setns calls, as long as the main
// thread is kept out of it by a main function that locks itself to it.
func (n *Netns) Do(fn func() error) error {
	enter := func() error {
		if err := setns(n.file); err != nil {
			return fmt.Errorf("entering netns %s: %w", n.key, err)
		}
		return nil
	}
	return visit(n.home, enter, fn)
}

// PanicError is what [Netns.Do] panics with when its closure panicked.
type PanicError struct {
	Value any    // what the closure panicked with
	Stack []byte // of the closure's goroutine
}

// Error returns the panic's value with the stack that the caller's own would
// not show.
func (e *PanicError) Error() string {
	return fmt.Sprintf("panic inside a netns: %v\n\n%s", e.Value, e.Stack)
}

// Unwrap returns the panic's value if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// outcome is how a visit ended.
type outcome struct {
	err      error
	panicked *PanicError
	exited   bool // runtime.Goexit, for instance by t.FailNow
}

// visit moves a thread with enter, runs fn on it, and moves it back to home.
func visit(home *os.File, enter, fn func() error) error {
	o := travel(home, enter, fn)
	switch {
	case o.panicked != nil:
		panic(o.panicked)
	case o.exited:
		runtime.Goexit()
	}
	return o.err
}

// travel is visit in a new goroutine that is locked to its thread.
func travel(home *os.File, enter, fn func() error) outcome {
	done := make(chan outcome, 1)
	go func() {
		var o outcome
		defer func() { done <- o }()
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The runtime never ends the main thread: astray, it would stay for good,
			// and /proc/PID/ns/net would show the wrong netns to everybody. While it
			// is locked here, the next goroutine gets another one. Waking that takes
			// 20 µs and more, so main had better lock itself to the main thread.
			o = travel(home, enter, fn)
			runtime.UnlockOSThread()
			return
		}
		if o.err = enter(); o.err != nil {
			runtime.UnlockOSThread() // it did not move
			return
		}
		defer func() {
			if err := setns(home); err != nil {
				// Still locked: the runtime ends the thread with the goroutine.
				o.err = errors.Join(o.err, fmt.Errorf("returning to the host's netns, the thread was given up: %w", err))
				return
			}
			runtime.UnlockOSThread()
		}()
		o.run(fn)
	}()
	return <-done
}

// run calls fn and keeps how it ended, whichever way that is.
func (o *outcome) run(fn func() error) {
	returned := false
	defer func() {
		if returned {
			return
		}
		if v := recover(); v != nil {
			o.panicked = &PanicError{Value: v, Stack: debug.Stack()}
			return
		}
		o.exited = true
	}()
	o.err = fn()
	returned = true
}

// setns moves the calling thread, which must be locked. The kernel checks the
// type again: it refuses what is no network namespace.
func setns(f *os.File) error {
	return control(f, func(fd int) error { return unix.Setns(fd, unix.CLONE_NEWNET) })
}
