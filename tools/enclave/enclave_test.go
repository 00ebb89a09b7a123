// SPDX-License-Identifier: Apache-2.0

package enclave

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestMain runs the tests inside an enclave, which is what most of them are about.
// TestRun makes further ones from there.
func TestMain(m *testing.M) {
	if program := os.Getenv("ENCLAVE_TEST_PROGRAM"); program != "" {
		os.Exit(runProgram(program))
	}
	code, err := Run(context.Background(), os.Stderr, func(context.Context, string) int { return m.Run() })
	if errors.Is(err, ErrRefused) {
		fmt.Fprintf(os.Stderr, "SKIP: %v\n", err)
		os.Exit(0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(code)
}

// runProgram is what the processes of the tests do.
func runProgram(name string) int {
	switch name {
	case "succeed", "fail", "until-signal":
		code, err := Run(context.Background(), os.Stdout, func(ctx context.Context, dir string) int {
			fmt.Printf("inside %s\n", dir)
			if err := os.WriteFile(filepath.Join(dir, "evidence"), nil, 0o600); err != nil {
				fmt.Println(err)
				return 1
			}
			switch name {
			case "fail":
				return 3
			case "until-signal":
				fmt.Println("waiting")
				<-ctx.Done()
				return 4
			}
			return 0
		})
		if err != nil {
			fmt.Println(err)
			return 1
		}
		return code
	case "links":
		links, err := net.Interfaces()
		if err != nil {
			fmt.Println(err)
			return 1
		}
		for _, link := range links {
			fmt.Println(link.Name, link.Flags&net.FlagUp != 0)
		}
		return 0
	case "stubborn":
		// Ends neither by itself nor by SIGTERM's default.
		read, _, err := os.Pipe()
		if err != nil {
			return 1
		}
		fmt.Println("waiting")
		_, _ = read.Read(make([]byte, 1))
		return 0
	}
	return 99
}

// start starts this test's binary as the program of that name.
func start(t *testing.T, program string, netns *Netns) *Process {
	t.Helper()
	starter, err := NewStarter()
	if err != nil {
		t.Fatal(err)
	}
	p, err := starter.Start(Command{
		Name: program, Path: "/proc/self/exe", Netns: netns,
		Env:     []string{"ENCLAVE_TEST_PROGRAM=" + program},
		LogFile: filepath.Join(t.TempDir(), program+".log"),
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func deadline(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func contains(text string) func(Line) bool {
	return func(l Line) bool { return strings.Contains(l.Text, text) }
}

func TestRunKeepsTheDirectoryOfAFailureOnly(t *testing.T) {
	for _, c := range []struct {
		program string
		signal  bool
		code    int
		kept    bool
	}{
		{program: "succeed", code: 0},
		{program: "fail", code: 3, kept: true},
		{program: "until-signal", signal: true, code: 4},
	} {
		t.Run(c.program, func(t *testing.T) {
			p := start(t, c.program, nil)
			line, err := p.Log().Await(deadline(t), 0, contains("inside "))
			if err != nil {
				t.Fatalf("%v; it said:\n%s", err, p.Log().Tail(10))
			}
			dir := strings.TrimPrefix(line.Text, "inside ")
			if c.signal {
				if _, err := p.Log().Await(deadline(t), 0, contains("waiting")); err != nil {
					t.Fatal(err)
				}
				if err := p.cmd.Process.Signal(unix.SIGINT); err != nil {
					t.Fatal(err)
				}
			}
			<-p.Ended()
			if got := p.cmd.ProcessState.ExitCode(); got != c.code {
				t.Errorf("exit code %d, want %d; it said:\n%s", got, c.code, p.Log().Tail(10))
			}
			if _, err := os.Stat(dir); (err == nil) != c.kept {
				t.Errorf("after the end stat of the run's directory gives %v, want kept = %v", err, c.kept)
			}
			if c.kept {
				if !strings.Contains(p.Log().Tail(10), "kept in "+dir) {
					t.Errorf("the kept directory is not named:\n%s", p.Log().Tail(10))
				}
				os.RemoveAll(dir)
			}
		})
	}
}

func TestInsideIsAFreshHost(t *testing.T) {
	links, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	if len(links) != 1 || links[0].Name != "lo" || links[0].Flags&net.FlagUp == 0 {
		t.Errorf("links are %v, want lo alone, and up", links)
	}
	if err := os.WriteFile("/run/probe", nil, 0o600); err != nil {
		t.Errorf("/run cannot be written: %v", err)
	}
	if got := os.Geteuid(); got != 0 {
		t.Errorf("user ID %d, want 0", got)
	}
}

func TestRefusedNamesTheWayOut(t *testing.T) {
	err := refused(unix.EPERM)
	if !errors.Is(err, ErrRefused) || !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "in a container") {
		t.Errorf("got %q, want ErrRefused and EPERM wrapped, and what to do", err)
	}
}

func TestNetns(t *testing.T) {
	ns, err := MakeNetns("enclave-test")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := MakeNetns("enclave-test"); !errors.Is(err, os.ErrExist) {
		t.Errorf("a second one of that name gives %v, want that it exists", err)
	}

	p := start(t, "links", ns)
	if err := p.Wait(deadline(t)); err != nil {
		t.Fatal(err)
	}
	if got := p.Log().Tail(5); got != "lo false\n" {
		t.Errorf("a process in the fresh namespace sees %q, want lo alone, and down", got)
	}
	if p := start(t, "links", nil); p.Wait(deadline(t)) != nil || p.Log().Tail(5) != "lo true\n" {
		t.Errorf("the next process starts in the wrong namespace: it sees %q", p.Log().Tail(5))
	}

	inside := uint64(0)
	if err := ns.Do(func() error { inside, err = cookie(); return err }); err != nil {
		t.Fatal(err)
	}
	if here, err := cookie(); err != nil || inside == here {
		t.Errorf("Do's netns cookie is %d, ours %d (%v), want different ones", inside, here, err)
	}

	if held, err := ns.HeldBy(os.Getpid()); held != 0 || err != nil {
		t.Errorf("held by %d descriptors (%v), want none", held, err)
	}
	f, err := os.Open(ns.Path())
	if err != nil {
		t.Fatal(err)
	}
	if held, err := ns.HeldBy(os.Getpid()); held != 1 || err != nil {
		t.Errorf("held by %d descriptors (%v), want 1", held, err)
	}
	f.Close()

	if err := ns.Remove(); err != nil {
		t.Fatal(err)
	}
	if err := ns.Do(func() error { return nil }); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Do after the removal gives %v, want that it does not exist", err)
	}
}

// cookie names the network namespace of the calling thread.
func cookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
}

func TestProcessEnds(t *testing.T) {
	p := start(t, "stubborn", nil)
	if _, err := p.Log().Await(deadline(t), 0, contains("waiting")); err != nil {
		t.Fatal(err)
	}
	if err := p.Stop(); err != nil {
		t.Errorf("stopping by SIGTERM: %v, want none", err)
	}
	if err := p.Stop(); err != nil {
		t.Errorf("stopping again: %v, want none", err)
	}
	if p.Usage() <= 0 {
		t.Error("the ended process used no CPU time")
	}
	if err := start(t, "no such program", nil).Wait(deadline(t)); err == nil || !strings.Contains(err.Error(), "99") {
		t.Errorf("an exit with code 99 gives %v", err)
	}
}

func TestLogAwaits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	log, err := newLog(path)
	if err != nil {
		t.Fatal(err)
	}
	read, write := io.Pipe()
	followed := make(chan error, 1)
	go func() { followed <- log.follow(read) }()

	found := make(chan Line, 1)
	go func() {
		line, err := log.Await(deadline(t), 1, contains("signed"))
		if err != nil {
			t.Error(err)
		}
		found <- line
	}()
	fmt.Fprintln(write, `{"msg":"signed","nr":0}`) // before the position asked for
	fmt.Fprintln(write, `not JSON`)
	fmt.Fprintln(write, `{"time":"2026-01-02T03:04:05.678Z","msg":"signed","nr":1,"ok":true}`)
	line := <-found
	if line.Field("nr") != "1" || line.Field("ok") != "true" || line.Field("none") != "" {
		t.Errorf("got %q", line.Text)
	}
	if want := time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC); !line.Time().Equal(want) {
		t.Errorf("its time is %v, want %v", line.Time(), want)
	}
	if got := len(log.Find(0, contains("signed"))); got != 2 {
		t.Errorf("found %d lines, want 2", got)
	}
	if got := log.Find(log.Len()+1, contains("signed")); got != nil {
		t.Errorf("found %v past the end", got)
	}

	write.Close()
	if err := errors.Join(<-followed, log.close()); err != nil {
		t.Fatal(err)
	}
	if _, err := log.Await(deadline(t), 0, contains("never")); !errors.Is(err, ErrEnded) {
		t.Errorf("awaiting past the end gives %v, want ErrEnded", err)
	}
	onDisk, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(onDisk, []byte(log.Tail(10))) {
		t.Errorf("the file holds %q (%v), want %q", onDisk, err, log.Tail(10))
	}
}
