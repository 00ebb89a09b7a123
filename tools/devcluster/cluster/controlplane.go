// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"ambientd/tools/devcluster/node"
)

// auditPolicy lets the API server write down every request once, when it is answered,
// without bodies.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
`

// environment is what the program at path gets: nothing of the caller's, which the
// container runtime would hand on to CNI plugins. What lies beside it comes first: containerd
// looks for its shim.
func environment(path, temp string) []string {
	return []string{
		"PATH=" + filepath.Dir(path) + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/nonexistent", "TMPDIR=" + temp,
	}
}

// startControlPlane starts etcd and kube-apiserver on the first node and waits for them.
func startControlPlane(ctx context.Context, cfg Config, state *State, bin binaries) error {
	policy := filepath.Join(state.Dir, "audit-policy.yaml")
	if err := os.WriteFile(policy, []byte(auditPolicy), 0o600); err != nil {
		return fmt.Errorf("writing the audit policy: %w", err)
	}
	const etcdURL, etcdPeerURL = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
	err := state.start(ctx, 0, "etcd", bin.etcd,
		"--name=devcluster", "--data-dir="+filepath.Join(state.Dir, "etcd"),
		// A cluster for tests does not outlive the machine's power.
		"--unsafe-no-fsync",
		"--listen-client-urls="+etcdURL, "--advertise-client-urls="+etcdURL,
		"--listen-peer-urls="+etcdPeerURL, "--initial-advertise-peer-urls="+etcdPeerURL, "--initial-cluster=devcluster="+etcdPeerURL,
		"--log-level=warn")
	if err != nil {
		return err
	}
	if err := state.start(ctx, 0, "kube-apiserver", filepath.Join(bin.kubernetes, "kube-apiserver"), apiServerFlags(cfg, state, etcdURL, policy)...); err != nil {
		return err
	}
	api, err := newAPI(state)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, apiDeadline)
	defer cancel()
	return api.waitReady(ctx)
}

func apiServerFlags(cfg Config, state *State, etcdURL, policy string) []string {
	key := func(name string) string { return filepath.Join(state.pki(), name) }
	const issuer = "https://kubernetes.default.svc.cluster.local"
	flags := []string{
		"--etcd-servers=" + etcdURL,
		"--bind-address=0.0.0.0", "--advertise-address=" + apiAddress, "--secure-port=" + apiPort,
		"--tls-cert-file=" + key("apiserver.crt"), "--tls-private-key-file=" + key("apiserver.key"),
		"--client-ca-file=" + key("ca.crt"),
		"--service-account-issuer=" + issuer, "--api-audiences=" + issuer,
		"--service-account-key-file=" + key("service-account.pub"), "--service-account-signing-key-file=" + key("service-account.key"),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--service-cluster-ip-range=" + serviceRange, "--endpoint-reconciler-type=none",
		"--kubelet-client-certificate=" + key("kubelet-client.crt"), "--kubelet-client-key=" + key("kubelet-client.key"),
		"--kubelet-certificate-authority=" + key("ca.crt"), "--kubelet-preferred-address-types=InternalIP",
		"--allow-privileged=true", "--profiling=false",
		"--audit-policy-file=" + policy, "--audit-log-path=" + cfg.AuditLog,
		"--feature-gates=" + strings.Join(cfg.gates(), ","),
		// The API of the certificates for pods, which is not served by itself.
		"--runtime-config=certificates.k8s.io/v1beta1=true,certificates.k8s.io/v1alpha1=true",
	}
	return append(flags, cfg.APIServerFlags...)
}

// start starts a program on node i.
func (s *State) start(ctx context.Context, i int, name, path string, args ...string) error {
	return s.Control(i).Start(ctx, node.Program{
		Name: name, Args: append([]string{path}, args...), Env: environment(path, s.temp(i)), Log: s.log(i, name),
	})
}
