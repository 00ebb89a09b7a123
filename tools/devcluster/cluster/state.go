// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"ambientd/tools/devcluster/node"
)

// State is what a cluster has of this machine, as its directory says. Each thing is written
// down before it is made, so that whoever takes the cluster down knows of all.
type State struct {
	Dir      string      `json:"dir"`
	Nodes    []NodeState `json:"nodes"`
	Workers  int         `json:"workers"`
	AuditLog string      `json:"auditLog"`
	// Programs is the directory of Kubernetes' programs.
	Programs string `json:"programs"`
	// Cgroups are the directories made for the nodes' pods.
	Cgroups   []string   `json:"cgroups,omitempty"`
	Delegated Delegation `json:"delegated"`
}

// NodeState is one node; the first has the control plane too.
type NodeState struct {
	Name    string       `json:"name"`
	Address string       `json:"address"`
	Process node.Process `json:"process"`
	// Cgroup is the path, in each hierarchy, of the cgroup of its pods.
	Cgroup string `json:"cgroup,omitempty"`
}

// Kubeconfig is the path of the cluster administrator's kubeconfig.
func (s *State) Kubeconfig() string { return filepath.Join(s.pki(), "admin.kubeconfig") }

func (s *State) pki() string { return filepath.Join(s.Dir, "pki") }

// NodeDir is the directory of node i, counted from 0.
func (s *State) NodeDir(i int) string { return filepath.Join(s.Dir, "nodes", s.Nodes[i].Name) }

// Control reaches the init process of node i.
func (s *State) Control(i int) node.Control {
	return node.Control{Socket: filepath.Join(s.NodeDir(i), "init.sock")}
}

// temp is where programs of node i put temporary files.
func (s *State) temp(i int) string { return filepath.Join(s.NodeDir(i), "tmp") }

func (s *State) log(i int, program string) string {
	return filepath.Join(s.Dir, "logs", s.Nodes[i].Name+"-"+program+".log")
}

// Environment is what a command needs to know of the cluster, as NAME=VALUE.
func (s *State) Environment() []string {
	env := []string{
		"KUBECONFIG=" + s.Kubeconfig(),
		"DEVCLUSTER_DIR=" + s.Dir,
		"DEVCLUSTER_AUDIT_LOG=" + s.AuditLog,
		fmt.Sprintf("DEVCLUSTER_NODES=%d", s.Workers),
		"DEVCLUSTER_BIN=" + s.Programs,
	}
	for i := range s.Nodes {
		env = append(env, fmt.Sprintf("DEVCLUSTER_NODE%d_PID=%d", i+1, s.Nodes[i].Process.PID))
		if s.Workers > 0 {
			env = append(env, fmt.Sprintf("DEVCLUSTER_NODE%d_CRI=%s", i+1, s.CRISocket(i)))
		}
	}
	return env
}

// CRISocket is the path, as the machine sees it, of the socket of node i's container runtime.
func (s *State) CRISocket(i int) string {
	return filepath.Join(s.NodeDir(i), "run", "containerd", "containerd.sock")
}

const stateFile = "cluster.json"

// save writes the state by rename: there is always a whole one.
func (s *State) save() error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding the cluster's state: %w", err)
	}
	path := filepath.Join(s.Dir, stateFile)
	if err := os.WriteFile(path+".new", append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("writing the cluster's state: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("writing the cluster's state: %w", err)
	}
	return nil
}

// ErrNone is wrapped by errors that say that there is no cluster.
var ErrNone = errors.New("no cluster")

// Load reads the state of the cluster in dir.
func Load(dir string) (*State, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("resolving the cluster's directory: %w", err)
	}
	data, err := os.ReadFile(filepath.Join(dir, stateFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w in %s (devcluster up makes one)", ErrNone, dir)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the cluster's state: %w", err)
	}
	s := new(State)
	if err := json.Unmarshal(data, s); err != nil {
		return nil, fmt.Errorf("reading the cluster's state in %s: %w", dir, err)
	}
	// Whatever the file says, only this directory is the cluster's.
	s.Dir = dir
	return s, nil
}

// lockDir keeps other runs of devcluster from the cluster in dir until the returned function
// is called, or this process ends. The lock lies beside dir, which itself comes and goes.
func lockDir(dir string) (unlock func(), err error) {
	path := dir + ".lock"
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the cluster's lock: %w", err)
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		file.Close()
		return nil, fmt.Errorf("another devcluster is at work on %s: %w", dir, err)
	}
	return func() {
		// While it is still held: whoever opens the path later makes a lock of its own.
		_ = os.Remove(path)
		file.Close()
	}, nil
}
