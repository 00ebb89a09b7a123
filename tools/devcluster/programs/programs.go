// SPDX-License-Identifier: Apache-2.0

// Package programs finds what a cluster is made of: Kubernetes' own programs, which it
// builds once from their Go module and keeps by exact version outside of the checkout, and
// those that come from Debian. It refuses to download a program, and to install one.
package programs

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Module is a Go module that pins programs as tools.
type Module struct {
	// Dir is where its go.mod lies.
	Dir string
	// Flags are for go build.
	Flags []string
	// Sources are files below Dir that decide what is built besides the versions in go.mod.
	Sources []string
	// Cost says for a program how much CPU time building it takes, the first time.
	Cost map[string]time.Duration
}

// Kubernetes is the module of the Kubernetes programs in the checkout.
func Kubernetes(checkout, version string) Module {
	const stamp = "k8s.io/component-base/version."
	minor := strings.Split(version, ".")[1]
	return Module{
		Dir: filepath.Join(checkout, "tools", "devcluster", "kubernetes"),
		// The servers refuse to start without a version: clients compare with it.
		Flags: []string{"-ldflags", "-s -w -X " + stamp + "gitVersion=" + version + " -X " + stamp + "gitMajor=1 -X " + stamp + "gitMinor=" + minor + " -X " + stamp + "gitTreeState=clean"},
		Cost: map[string]time.Duration{
			"kube-apiserver": 1020 * time.Second, "kubelet": 200 * time.Second, "kube-controller-manager": 115 * time.Second,
			"kube-scheduler": 20 * time.Second, "kubectl": 125 * time.Second,
		},
	}
}

// Containerd is the module of containerd 2 in the checkout.
func Containerd(checkout string) Module {
	return Module{
		Dir: filepath.Join(checkout, "tools", "devcluster", "containerd"), Flags: []string{"-ldflags", "-s -w"},
		Cost: map[string]time.Duration{"containerd": 230 * time.Second, "containerd-shim-runc-v2": 10 * time.Second, "ctr": 30 * time.Second},
	}
}

// Own is devcluster's own module, of which the programs made of those source files are built.
func Own(checkout string, sources ...string) Module {
	return Module{
		Dir: filepath.Join(checkout, "tools", "devcluster"), Flags: []string{"-ldflags", "-s -w"}, Sources: sources,
		Cost: map[string]time.Duration{"pause": time.Second},
	}
}

// Builder builds programs of modules once.
type Builder struct {
	// Cache is the directory that keeps them.
	Cache string
	// Progress is told what takes long.
	Progress io.Writer
}

// CacheDir is where built programs are kept, the same as common.sh's cache_dir.
func CacheDir() (string, error) {
	if dir := os.Getenv("XDG_CACHE_HOME"); dir != "" {
		return filepath.Join(dir, "ambientd"), nil
	}
	home := os.Getenv("HOME")
	if home == "" {
		return "", errors.New("neither HOME nor XDG_CACHE_HOME is set: no place to keep built programs")
	}
	return filepath.Join(home, ".cache", "ambientd"), nil
}

// Build returns the directory that holds the programs, each the last part of one of the
// packages' paths, after building those that are not there yet. A build that is interrupted
// leaves nothing that a later one takes for a program; of several at the same time, one
// builds and the others wait.
func (b Builder) Build(ctx context.Context, m Module, packages []string) (string, error) {
	dir, err := b.dir(ctx, m)
	if err != nil {
		return "", err
	}
	if missing(dir, packages) == nil {
		return dir, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("making the cache of programs: %w", err)
	}
	unlock, err := lock(ctx, filepath.Join(dir, ".lock"), func() {
		fmt.Fprintf(b.Progress, "waiting for another build into %s\n", dir)
	})
	if err != nil {
		return "", err
	}
	defer unlock()
	if err := removeUnfinished(dir); err != nil {
		return "", err
	}
	for _, pkg := range missing(dir, packages) {
		if err := b.build(ctx, m, pkg, dir); err != nil {
			return "", err
		}
	}
	return dir, nil
}

// dir is a directory of its own for everything that decides what a build gives.
func (b Builder) dir(ctx context.Context, m Module) (string, error) {
	version, err := exec.CommandContext(ctx, "go", "env", "GOVERSION").Output()
	if err != nil {
		return "", fmt.Errorf("asking go for its version (is Go installed?): %w", err)
	}
	sum := sha256.New()
	for _, name := range append([]string{"go.mod", "go.sum"}, m.Sources...) {
		content, err := os.ReadFile(filepath.Join(m.Dir, name))
		if err != nil {
			return "", fmt.Errorf("reading which version to build: %w", err)
		}
		sum.Write(content)
	}
	fmt.Fprint(sum, m.Flags)
	key := fmt.Sprintf("%s-%s-%x", strings.TrimSpace(string(version)), runtime.GOARCH, sum.Sum(nil)[:6])
	return filepath.Join(b.Cache, filepath.Base(m.Dir), key), nil
}

func missing(dir string, packages []string) []string {
	var missing []string
	for _, pkg := range packages {
		if _, err := os.Stat(filepath.Join(dir, filepath.Base(pkg))); err != nil {
			missing = append(missing, pkg)
		}
	}
	return missing
}

// unfinished is the prefix of what is being built.
const unfinished = ".building-"

func removeUnfinished(dir string) error {
	left, err := filepath.Glob(filepath.Join(dir, unfinished+"*"))
	if err != nil {
		return fmt.Errorf("looking for unfinished builds: %w", err)
	}
	for _, path := range left {
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("removing an unfinished build: %w", err)
		}
	}
	return nil
}

// build builds one program and puts it into dir by rename.
func (b Builder) build(ctx context.Context, m Module, pkg, dir string) error {
	name := filepath.Base(pkg)
	fmt.Fprintf(b.Progress, "building %s, this first time only, into %s: about %s of CPU time\n", name, dir, m.Cost[name])
	temp := filepath.Join(dir, unfinished+name)
	args := append([]string{"build", "-trimpath", "-buildvcs=false", "-o", temp}, m.Flags...)
	cmd := exec.CommandContext(ctx, "go", append(args, pkg)...)
	cmd.Dir = m.Dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	// Interrupted, go still waits for the compilers that it has started.
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGINT) }
	cmd.Stdout, cmd.Stderr = b.Progress, b.Progress
	start := time.Now()
	stop := b.tick(name, start)
	err := cmd.Run()
	stop()
	if err != nil {
		return fmt.Errorf("building %s in %s: %w", pkg, m.Dir, err)
	}
	if err := os.Rename(temp, filepath.Join(dir, name)); err != nil {
		return fmt.Errorf("keeping %s: %w", name, err)
	}
	fmt.Fprintf(b.Progress, "built %s in %s\n", name, time.Since(start).Round(time.Second))
	return nil
}

// tick says every half a minute that a build goes on, until the returned function is called.
func (b Builder) tick(name string, start time.Time) (stop func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		ticker := time.NewTicker(30 * time.Second)
		defer ticker.Stop()
		for {
			select {
			case <-done:
				return
			case <-ticker.C:
				fmt.Fprintf(b.Progress, "still building %s, for %s\n", name, time.Since(start).Round(time.Second))
			}
		}
	}()
	return func() { close(done); <-ended }
}

// lock takes the lock file at path; wait is called before the lock is waited for.
func lock(ctx context.Context, path string, wait func()) (unlock func(), err error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("opening a lock: %w", err)
	}
	if unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
		return func() { file.Close() }, nil
	}
	wait()
	got := make(chan error, 1)
	go func() { got <- unix.Flock(int(file.Fd()), unix.LOCK_EX) }()
	select {
	case err := <-got:
		if err != nil {
			file.Close()
			return nil, fmt.Errorf("waiting for the lock %s: %w", path, err)
		}
		return func() { file.Close() }, nil
	case <-ctx.Done():
		return nil, ctx.Err() // the process ends; the file stays open for the goroutine that waits
	}
}

// Debian says where a program that a Debian package brings is installed.
func Debian(program, debianPackage string) (string, error) {
	for _, dir := range []string{"/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin", "/usr/local/sbin"} {
		path := filepath.Join(dir, program)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s is not installed: on Debian, as root: apt-get install %s", program, debianPackage)
}
