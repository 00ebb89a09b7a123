// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// cgroupMounts are where the machine has its cgroups.
type cgroupMounts struct {
	v1 []string // one for each hierarchy
	v2 string
}

// findCgroups reads them from a mountinfo.
func findCgroups(path string) (cgroupMounts, error) {
	file, err := os.Open(path)
	if err != nil {
		return cgroupMounts{}, fmt.Errorf("looking for cgroups: %w", err)
	}
	defer file.Close()
	var found cgroupMounts
	scanner := bufio.NewScanner(file)
	for scanner.Scan() {
		// ID, parent, device, root, mount point, options, optional fields, "-", type, ...
		before, after, _ := strings.Cut(scanner.Text(), " - ")
		fields, kind := strings.Fields(before), strings.Fields(after)
		if len(fields) < 5 || len(kind) < 1 || fields[3] != "/" {
			continue
		}
		switch kind[0] {
		case "cgroup":
			found.v1 = append(found.v1, fields[4])
		case "cgroup2":
			found.v2 = fields[4]
		}
	}
	if err := scanner.Err(); err != nil {
		return cgroupMounts{}, fmt.Errorf("looking for cgroups: %w", err)
	}
	if len(found.v1) == 0 && found.v2 == "" {
		return cgroupMounts{}, errors.New("this machine has no cgroups mounted: kubelet needs them, of version 1 or 2")
	}
	return found, nil
}

// controllers are those of cgroup v2 that kubelet asks for.
var controllers = []string{"cpuset", "cpu", "io", "memory", "pids"} //nolint:gochecknoglobals // nothing writes to it

// makeCgroups makes a cgroup in each hierarchy for each node, below which kubelet puts its
// pods, and writes down all of them first.
func makeCgroups(state *State, mounts cgroupMounts) error {
	random := make([]byte, 4)
	rand.Read(random) // never fails
	all := slices.Clone(mounts.v1)
	if mounts.v2 != "" {
		all = append(all, mounts.v2)
	}
	for i := range state.Nodes {
		state.Nodes[i].Cgroup = "/devcluster-" + hex.EncodeToString(random) + "-" + state.Nodes[i].Name
		for _, mount := range all {
			state.Cgroups = append(state.Cgroups, mount+state.Nodes[i].Cgroup)
		}
	}
	if len(mounts.v1) == 0 {
		missing, err := notDelegated(mounts.v2)
		if err != nil {
			return err
		}
		state.Delegated = Delegation{Cgroup: mounts.v2, Controllers: missing}
	}
	if err := state.save(); err != nil {
		return err
	}
	if err := state.Delegated.write("+"); err != nil {
		return err
	}
	for _, dir := range state.Cgroups {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("making a cgroup for pods: %w", err)
		}
		if err := inheritCpuset(dir); err != nil {
			return err
		}
	}
	return nil
}

// inheritCpuset gives a cgroup of version 1 the processors and memory of its parent: until
// it has some, no process can be in it.
func inheritCpuset(dir string) error {
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		path := filepath.Join(dir, name)
		if content, err := os.ReadFile(path); err != nil || strings.TrimSpace(string(content)) != "" {
			continue // another hierarchy, or cgroup v2 where it is not needed
		}
		parent, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err == nil {
			err = os.WriteFile(path, parent, 0o644)
		}
		if err != nil {
			return fmt.Errorf("giving the cgroup %s its processors: %w", dir, err)
		}
	}
	return nil
}

// Delegation is what was added to the controllers that a cgroup of version 2 passes on.
type Delegation struct {
	Cgroup      string   `json:"cgroup,omitempty"`
	Controllers []string `json:"controllers,omitempty"`
}

// notDelegated returns those of the controllers that the root cgroup has and does not pass on.
func notDelegated(root string) ([]string, error) {
	var has [2][]string
	for i, name := range []string{"cgroup.controllers", "cgroup.subtree_control"} {
		content, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			return nil, fmt.Errorf("looking which cgroup controllers there are: %w", err)
		}
		has[i] = strings.Fields(string(content))
	}
	var missing []string
	for _, c := range controllers {
		if slices.Contains(has[0], c) && !slices.Contains(has[1], c) {
			missing = append(missing, c)
		}
	}
	return missing, nil
}

// write adds ("+") or takes back ("-") the controllers.
func (d Delegation) write(sign string) error {
	for _, c := range d.Controllers {
		if err := os.WriteFile(filepath.Join(d.Cgroup, "cgroup.subtree_control"), []byte(sign+c), 0o644); err != nil {
			return fmt.Errorf("passing on the cgroup controller %s%s: %w", sign, c, err)
		}
	}
	return nil
}

// removeCgroups removes what makeCgroups made and kubelet made below. The processes in them
// have ended; the kernel may need a moment to see it.
func removeCgroups(ctx context.Context, state *State) error {
	err := poll(ctx, func() (retry, fatal error) {
		for _, root := range state.Cgroups {
			retry = errors.Join(retry, removeCgroup(root))
		}
		return retry, nil
	})
	if err != nil {
		return fmt.Errorf("removing the pods' cgroups: %w", err)
	}
	return state.Delegated.write("-")
}

func removeCgroup(root string) error {
	var dirs []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			dirs = append(dirs, path)
		}
		return ignoreMissing(err)
	})
	if err != nil {
		return fmt.Errorf("looking into the cgroup %s: %w", root, err)
	}
	for _, dir := range slices.Backward(dirs) {
		// Not os.Remove, which tries to unlink it as a file too and hides why rmdir failed.
		if err := ignoreMissing(unix.Rmdir(dir)); err != nil {
			return fmt.Errorf("removing the cgroup %s: %w", dir, err)
		}
	}
	return nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// nodeDeadline bounds the time until a node says that it is ready.
const nodeDeadline = 3 * time.Minute
