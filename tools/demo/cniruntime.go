// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"ambientd/tools/enclave"
)

// bridge is the interface that all pods are plugged into.
const bridge = "demo0"

// podInterface is the name that runtimes give to a pod's interface.
const podInterface = "eth0"

// cniRuntime does with pods what containerd and CRI-O do: a network namespace, the
// loopback plugin, then the node's conflist, all through libcni.
type cniRuntime struct {
	cni      *libcni.CNIConfig
	loopback *libcni.NetworkConfigList
	network  *libcni.NetworkConfigList
}

// newRuntime keeps its files in dir, and looks for plugins in the directories bin.
func newRuntime(dir string, bin ...string) (*cniRuntime, error) {
	loopback, err := conflist("cni-loopback", map[string]any{"type": "loopback"})
	if err != nil {
		return nil, err
	}
	network, err := conflist("demo",
		map[string]any{
			"type": "bridge", "bridge": bridge, "isDefaultGateway": true,
			"ipam": map[string]any{
				"type": "host-local", "dataDir": filepath.Join(dir, "ipam"),
				"ranges": [][]map[string]any{{{"subnet": "10.88.0.0/24"}}, {{"subnet": "fd88:8888::/64"}}},
			},
		},
		map[string]any{"type": "ambient-cni"})
	if err != nil {
		return nil, err
	}
	return &cniRuntime{
		cni:      libcni.NewCNIConfigWithCacheDir(bin, filepath.Join(dir, "cni-cache"), nil),
		loopback: loopback,
		network:  network,
	}, nil
}

// conflist returns the network configuration list of these plugins.
func conflist(name string, plugins ...map[string]any) (*libcni.NetworkConfigList, error) {
	text, err := json.Marshal(map[string]any{"cniVersion": "1.1.0", "name": name, "plugins": plugins})
	if err != nil {
		return nil, fmt.Errorf("encoding the network configuration: %w", err)
	}
	list, err := libcni.NetworkConfFromBytes(text)
	if err != nil {
		return nil, fmt.Errorf("reading the network configuration: %w", err)
	}
	return list, nil
}

// add makes the pod's sandbox. After a failure the sandbox is there as the failing
// plugin left it, like with a runtime, until remove.
func (r *cniRuntime) add(ctx context.Context, p *pod) error {
	p.containerID = strings.ReplaceAll(newUID(), "-", "")
	netns, err := enclave.MakeNetns("cni-" + newUID())
	if err != nil {
		return err
	}
	p.netns = netns
	if _, err := r.cni.AddNetworkList(ctx, r.loopback, r.conf(p, "lo", netns.Path())); err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	result, err := r.cni.AddNetworkList(ctx, r.network, r.conf(p, podInterface, netns.Path()))
	if err != nil {
		return err
	}
	p.ips, err = addresses(result)
	return err
}

// del runs DEL for the pod, with its network namespace or, as runtimes do when that
// is gone, without.
func (r *cniRuntime) del(ctx context.Context, p *pod, netnsPath string) error {
	return r.cni.DelNetworkList(ctx, r.network, r.conf(p, podInterface, netnsPath))
}

// remove takes the sandbox's network namespace away, after del.
func (r *cniRuntime) remove(ctx context.Context, p *pod) error {
	err := r.cni.DelNetworkList(ctx, r.loopback, r.conf(p, "lo", p.netns.Path()))
	if err != nil {
		err = fmt.Errorf("loopback: %w", err)
	}
	return errors.Join(err, p.netns.Remove())
}

// conf is what containerd passes for a pod.
func (r *cniRuntime) conf(p *pod, ifName, netnsPath string) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{
		ContainerID: p.containerID, NetNS: netnsPath, IfName: ifName,
		Args: [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", p.namespace},
			{"K8S_POD_NAME", p.name},
			{"K8S_POD_INFRA_CONTAINER_ID", p.containerID},
			{"K8S_POD_UID", p.uid},
		},
	}
}

// addresses returns the addresses of a result: one of each family, IPv4 first.
func addresses(result types.Result) ([]netip.Addr, error) {
	res, err := current.NewResultFromResult(result)
	if err != nil {
		return nil, fmt.Errorf("reading the result of ADD: %w", err)
	}
	var ips []netip.Addr
	for _, ip := range res.IPs {
		addr, ok := netip.AddrFromSlice(ip.Address.IP)
		if !ok {
			return nil, fmt.Errorf("reading the result of ADD: %v is no address", ip.Address)
		}
		ips = append(ips, addr.Unmap())
	}
	if len(ips) != 2 || !ips[0].Is4() || !ips[1].Is6() {
		return nil, fmt.Errorf("ADD gave the addresses %v, want one of each family", ips)
	}
	return ips, nil
}
