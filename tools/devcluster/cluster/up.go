// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"ambientd/tools/devcluster/node"
	"ambientd/tools/devcluster/pki"
)

// apiDeadline bounds the start of the API server, on a machine that has other things to do.
const apiDeadline = 3 * time.Minute

// Up brings a cluster up; it ends with the calling thread if life says so. After an error
// nothing is left of it: the error quotes the log of the program that is to blame.
func Up(ctx context.Context, cfg Config, life node.Lifetime) (*State, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	bin, err := find(ctx, cfg)
	if err != nil {
		return nil, err
	}
	unlock, err := lockDir(cfg.Dir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := claim(cfg.Dir); err != nil {
		return nil, err
	}
	started := time.Now()
	fmt.Fprintf(cfg.Progress, "starting a cluster in %s\n", cfg.Dir)
	state := &State{Dir: cfg.Dir, Workers: cfg.Nodes, AuditLog: cfg.AuditLog, Programs: bin.kubernetes}
	if err := bringUp(ctx, cfg, state, bin, life); err != nil {
		// ctx may be what ended it.
		return nil, errors.Join(err, down(context.WithoutCancel(ctx), state))
	}
	fmt.Fprintf(cfg.Progress, "the cluster is up after %s\n", time.Since(started).Round(100*time.Millisecond))
	return state, nil
}

func bringUp(ctx context.Context, cfg Config, state *State, bin binaries, life node.Lifetime) error {
	for i := range max(cfg.Nodes, 1) {
		state.Nodes = append(state.Nodes, NodeState{Name: fmt.Sprintf("node%d", i+1), Address: nodeAddress(i)})
	}
	if err := os.Mkdir(filepath.Join(state.Dir, "logs"), 0o700); err != nil {
		return fmt.Errorf("making the directory of logs: %w", err)
	}
	if err := state.save(); err != nil {
		return err
	}
	if cfg.Nodes > 0 {
		mounts, err := findCgroups("/proc/self/mountinfo")
		if err != nil {
			return err
		}
		if err := makeCgroups(state, mounts); err != nil {
			return err
		}
	}
	for i := range state.Nodes {
		if err := startNode(ctx, cfg, state, i, life); err != nil {
			return err
		}
	}
	if err := errors.Join(connect(ctx, state), makeKeys(state)); err != nil {
		return err
	}
	if cfg.Nodes == 0 {
		return startControlPlane(ctx, cfg, state, bin)
	}
	return bringUpPods(ctx, cfg, state, bin)
}

// bringUpPods brings up what runs pods. The runtimes and the API server do not need each
// other, so they start at the same time.
func bringUpPods(ctx context.Context, cfg Config, state *State, bin binaries) error {
	images, err := writeImages(ctx, state, bin)
	if err != nil {
		return err
	}
	images = append(images, cfg.Images...)
	errs := make([]error, len(state.Nodes)+1)
	var group sync.WaitGroup
	group.Go(func() { errs[len(state.Nodes)] = startControlPlane(ctx, cfg, state, bin) })
	for i := range state.Nodes {
		group.Go(func() {
			if errs[i] = state.installPlugins(i, bin.cni); errs[i] == nil {
				errs[i] = state.startRuntime(ctx, i, bin, images)
			}
		})
	}
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := state.startManagers(ctx, cfg, bin); err != nil {
		return err
	}
	for i := range state.Nodes {
		if err := state.startKubelet(ctx, i, bin); err != nil {
			return err
		}
	}
	api, err := newAPI(state)
	if err != nil {
		return err
	}
	return api.waitNodes(ctx)
}

// startNode starts the init process of node i.
func startNode(ctx context.Context, cfg Config, state *State, i int, life node.Lifetime) error {
	if err := os.MkdirAll(state.temp(i), 0o700); err != nil {
		return fmt.Errorf("making the directory of %s: %w", state.Nodes[i].Name, err)
	}
	log, err := os.OpenFile(state.log(i, "init"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("opening the log of %s: %w", state.Nodes[i].Name, err)
	}
	defer log.Close()
	mounts, err := state.worker(i, cfg)
	if err != nil {
		return err
	}
	_, err = node.Start(ctx, mounts, life, log, func(p node.Process) error {
		state.Nodes[i].Process = p
		return state.save()
	})
	return err
}

// claim makes dir, or takes an empty one.
func claim(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("making the cluster's directory: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("looking into the cluster's directory: %w", err)
	}
	if len(entries) > 0 {
		if _, err := Load(dir); err == nil {
			return fmt.Errorf("there is a cluster in %s already: take it down first (devcluster down --dir %s), or choose another directory with --dir", dir, dir)
		}
		return fmt.Errorf("the directory %s is not empty: choose another with --dir", dir)
	}
	return nil
}

// makeKeys makes all keys, certificates and kubeconfigs of the cluster.
func makeKeys(state *State) error {
	ca, err := pki.New(state.pki())
	if err != nil {
		return err
	}
	const masters = "system:masters"
	subjects := []pki.Subject{
		{File: "apiserver", User: "kube-apiserver", Hosts: []string{
			"localhost", "127.0.0.1", apiAddress, serviceAddress,
			"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local",
		}},
		{File: "kubelet-client", User: "kube-apiserver-kubelet-client", Groups: []string{masters}},
		{File: "admin", User: "admin", Groups: []string{masters}},
		{File: "controller-manager", User: "system:kube-controller-manager"},
		{File: "scheduler", User: "system:kube-scheduler"},
	}
	users := []string{"admin", "controller-manager", "scheduler"}
	for _, n := range state.Nodes {
		user := "system:node:" + n.Name
		subjects = append(subjects,
			pki.Subject{File: n.Name, User: user, Groups: []string{"system:nodes"}},
			pki.Subject{File: n.Name + "-serving", User: user, Groups: []string{"system:nodes"}, Hosts: []string{n.Name, n.Address}})
		users = append(users, n.Name)
	}
	for _, s := range subjects {
		if err := ca.Issue(s); err != nil {
			return err
		}
	}
	for _, user := range users {
		if err := ca.Kubeconfig(user, apiURL); err != nil {
			return err
		}
	}
	return ca.SigningKey("service-account")
}

// ip runs commands of the program ip in the network namespace of node i.
func (s *State) ip(ctx context.Context, i int, commands ...string) error {
	return s.Nodes[i].Process.InNetns(func() error {
		cmd := exec.CommandContext(ctx, "ip", "-batch", "-")
		cmd.Stdin = strings.NewReader(strings.Join(commands, "\n") + "\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("configuring the network of %s: %w: %s", s.Nodes[i].Name, err, strings.TrimSpace(string(out)))
		}
		return nil
	})
}
