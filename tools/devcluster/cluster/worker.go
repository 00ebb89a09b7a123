// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"ambientd/tools/devcluster/node"
)

// The names under which the images that every cluster has are known.
const (
	PauseImage   = "localhost/pause:1"
	BusyboxImage = "localhost/busybox:1"
)

// templates are the configuration files of a node's programs.
//
//go:embed templates
var templates embed.FS

// settings is what the templates need.
type settings struct {
	Name, Address, Cgroup, PodRange string
	PKI, PauseImage, CNIVersion     string
	FeatureGates                    []string
}

// sysctls are those that kubelet checks, with the values that it wants. The node sees files
// with these in place of the machine's, so kubelet has nothing to change.
func sysctls() map[string]string {
	return map[string]string{
		"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
		"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
	}
}

// worker prepares the files of node i, if it runs pods, and returns what its init process
// mounts: each node has what programs write to on a machine as a directory of its own, at
// the usual path.
func (s *State) worker(i int, cfg Config) (node.Config, error) {
	dir := s.NodeDir(i)
	mounts := node.Config{Hostname: s.Nodes[i].Name, Control: s.Control(i).Socket}
	if s.Workers == 0 {
		return mounts, nil
	}
	for _, path := range layeredDirs {
		layer := filepath.Join(dir, "layers", strings.ReplaceAll(path[1:], "/", "-"))
		mounts.Overlays = append(mounts.Overlays, node.Overlay{Target: path, Upper: filepath.Join(layer, "upper"), Work: filepath.Join(layer, "work")})
	}
	for _, own := range []struct{ name, path string }{
		{"run", "/run"}, {"log", "/var/log"},
		{"containerd", "/var/lib/containerd"}, {"kubelet", "/var/lib/kubelet"},
		{"net.d", "/etc/cni/net.d"}, {"cni-bin", "/opt/cni/bin"}, {"manifests", "/etc/kubernetes/manifests"},
	} {
		source := filepath.Join(dir, own.name)
		if err := os.MkdirAll(source, 0o755); err != nil {
			return mounts, fmt.Errorf("making the directories of %s: %w", s.Nodes[i].Name, err)
		}
		mounts.Binds = append(mounts.Binds, node.Bind{Source: source, Target: own.path})
	}
	for name, value := range sysctls() {
		source := filepath.Join(dir, "sysctl", name)
		if err := writeFile(source, value+"\n"); err != nil {
			return mounts, err
		}
		mounts.Binds = append(mounts.Binds, node.Bind{Source: source, Target: "/proc/sys/" + name})
	}
	mounts.Binds = append(mounts.Binds, node.Bind{Source: filepath.Join(dir, "resolv.conf"), Target: "/etc/kubernetes/resolv.conf"})
	return mounts, s.writeSettings(i, cfg)
}

// writeSettings writes the configuration of the programs of node i.
func (s *State) writeSettings(i int, cfg Config) error {
	n := s.Nodes[i]
	values := settings{
		Name: n.Name, Address: n.Address, Cgroup: n.Cgroup, PodRange: podRange(i),
		PKI: s.pki(), PauseImage: PauseImage, FeatureGates: cfg.gates(),
		CNIVersion: "1.0.0",
	}
	if cfg.Containerd == 2 {
		values.CNIVersion = "1.1.0" // the first with STATUS and GC
	}
	parsed, err := template.New("").Funcs(template.FuncMap{
		"gate": func(gate string) string { return strings.Replace(gate, "=", ": ", 1) },
	}).ParseFS(templates, "templates/*")
	if err != nil {
		return fmt.Errorf("reading the templates: %w", err)
	}
	for name, path := range map[string]string{
		"kubelet.yaml": "kubelet.yaml",
		fmt.Sprintf("containerd%d.toml", cfg.Containerd): "containerd.toml",
		"resolv.conf":            "resolv.conf",
		"10-devcluster.conflist": filepath.Join("net.d", "10-devcluster.conflist"),
	} {
		var text strings.Builder
		if err := parsed.ExecuteTemplate(&text, name, values); err != nil {
			return fmt.Errorf("writing %s of %s: %w", name, n.Name, err)
		}
		if err := writeFile(filepath.Join(s.NodeDir(i), path), text.String()); err != nil {
			return err
		}
	}
	return nil
}

func writeFile(path, content string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("making the directory of %s: %w", path, err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

// startRuntime starts the container runtime of node i and gives it the images.
func (s *State) startRuntime(ctx context.Context, i int, bin binaries, images []string) error {
	config := filepath.Join(s.NodeDir(i), "containerd.toml")
	if err := s.start(ctx, i, "containerd", bin.containerd, "--config", config); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, nodeDeadline)
	defer cancel()
	err := poll(ctx, func() (retry, fatal error) {
		if err := s.Control(i).Running(ctx, "containerd"); err != nil {
			return nil, err
		}
		return ctr(ctx, bin, s.CRISocket(i), "version"), nil
	})
	if err != nil {
		return fmt.Errorf("waiting for containerd of %s: %w", s.Nodes[i].Name, err)
	}
	for _, image := range images {
		if err := ctr(ctx, bin, s.CRISocket(i), "images", "import", image); err != nil {
			return fmt.Errorf("importing the image %s into %s: %w", image, s.Nodes[i].Name, err)
		}
	}
	return nil
}

// startManagers starts what makes pods of what the API server holds.
func (s *State) startManagers(ctx context.Context, cfg Config, bin binaries) error {
	key := func(name string) string { return filepath.Join(s.pki(), name) }
	for _, program := range []struct {
		name, user string
		flags      []string
	}{
		{"kube-controller-manager", "controller-manager", []string{
			"--use-service-account-credentials=true", "--service-account-private-key-file=" + key("service-account.key"),
			"--root-ca-file=" + key("ca.crt"), "--cluster-signing-cert-file=" + key("ca.crt"), "--cluster-signing-key-file=" + key("ca.key"),
			// The default is a directory of the machine, which is made if it is not there.
			"--flex-volume-plugin-dir=/var/lib/kubelet/volume-plugins",
			// There is no cloud, and nodes have their pods' addresses from us.
			"--controllers=*,-node-ipam-controller,-node-route-controller,-cloud-node-lifecycle-controller",
		}},
		{"kube-scheduler", "scheduler", nil},
	} {
		config := key(program.user + ".kubeconfig")
		flags := append([]string{
			"--kubeconfig=" + config, "--authentication-kubeconfig=" + config, "--authorization-kubeconfig=" + config,
			"--bind-address=127.0.0.1", "--leader-elect=false", "--feature-gates=" + strings.Join(cfg.gates(), ","),
		}, program.flags...)
		if err := s.start(ctx, 0, program.name, filepath.Join(bin.kubernetes, program.name), flags...); err != nil {
			return err
		}
	}
	return nil
}

// startKubelet starts the kubelet of node i.
func (s *State) startKubelet(ctx context.Context, i int, bin binaries) error {
	n := s.Nodes[i]
	return s.start(ctx, i, "kubelet", filepath.Join(bin.kubernetes, "kubelet"),
		"--config="+filepath.Join(s.NodeDir(i), "kubelet.yaml"), "--kubeconfig="+filepath.Join(s.pki(), n.Name+".kubeconfig"),
		"--hostname-override="+n.Name, "--node-ip="+n.Address)
}

// waitNodes waits until all nodes say that they are ready, and pods can be made in the
// namespace default.
func (a *api) waitNodes(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, nodeDeadline)
	defer cancel()
	err := poll(ctx, func() (retry, fatal error) {
		for i := range a.state.Nodes {
			if err := a.state.allRunning(ctx, i); err != nil {
				return nil, err
			}
		}
		if err := a.get(ctx, "/api/v1/namespaces/default/serviceaccounts/default", nil); err != nil {
			return err, nil
		}
		return a.nodesReady(ctx), nil
	})
	if err != nil {
		return fmt.Errorf("waiting for the nodes (logs are in %s): %w", filepath.Join(a.state.Dir, "logs"), err)
	}
	return nil
}

func (a *api) nodesReady(ctx context.Context) error {
	var errs []error
	for _, n := range a.state.Nodes {
		var object struct {
			Status struct {
				Conditions []struct{ Type, Status, Message string }
			}
		}
		if err := a.get(ctx, "/api/v1/nodes/"+n.Name, &object); err != nil {
			errs = append(errs, err)
			continue
		}
		ready := fmt.Errorf("%s does not say yet whether it is ready", n.Name)
		for _, c := range object.Status.Conditions {
			switch {
			case c.Type != "Ready":
			case c.Status == "True":
				ready = nil
			default:
				ready = fmt.Errorf("%s is not ready: %s", n.Name, c.Message)
			}
		}
		errs = append(errs, ready)
	}
	return errors.Join(errs...)
}

// allRunning returns an error if a program of node i has ended.
func (s *State) allRunning(ctx context.Context, i int) error {
	programs, err := s.Control(i).List(ctx)
	if err != nil {
		return err
	}
	for _, p := range programs {
		if err := s.Control(i).Running(ctx, p.Name); err != nil {
			return err
		}
	}
	return nil
}
