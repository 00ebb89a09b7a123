// SPDX-License-Identifier: Apache-2.0

package main

import (
	"flag"
	"strings"

	"ambientd/nodeagent/agent"
	"ambientd/nodeagent/workload"
)

// settings binds each flag, and each key of the configuration file, to its field.
type settings struct {
	cfg   agent.Config
	file  string // --config
	flags *flags
	keys  map[string]string // key of the file → flag
}

// newSettings returns the defaults, with the flags that change them.
func newSettings() (*settings, error) {
	node, err := nodeName()
	if err != nil {
		return nil, err
	}
	s := &settings{cfg: agent.Default(), flags: newFlags("run"), keys: map[string]string{}}
	s.cfg.NodeName = node
	s.addGeneral()
	s.addSelection()
	s.addRedirection()
	s.addCertificates()
	s.addTimeouts()
	return s, nil
}

// add binds a flag and a key to value. See flags.add.
func (s *settings) add(value flag.Value, spec, key, usage string) {
	s.keys[key] = s.flags.add(value, spec, usage)
}

// addDerived is add for a value whose default depends on another setting; usage
// describes it.
func (s *settings) addDerived(value flag.Value, spec, key, usage string) {
	s.keys[key] = s.flags.addDerived(value, spec, usage)
}

func (s *settings) addGeneral() {
	c := &s.cfg
	s.flags.group("General")
	s.flags.add((*text)(&s.file), "config PATH", "configuration file, as below")
	s.addDerived((*text)(&c.NodeName), "node-name NAME", "nodeName", "this node, by its name in the cluster (default: $NODE_NAME, or else the machine's name)")
	s.add((*text)(&c.LogLevel), "log-level LEVEL", "logLevel", "debug, info, warn or error")
	s.add((*text)(&c.LogFormat), "log-format FORMAT", "logFormat", "of the log on standard error: text or json")

	s.flags.group("Sockets and files")
	s.add((*text)(&c.RunDir), "run-dir DIR", "runDir", "the agent's sockets, on tmpfs; made with mode 0711")
	s.addDerived((*text)(&c.CNISocket), "cni-socket PATH", "cniSocket", "unix socket for the CNI plugin (default <run-dir>/private/cni.sock)")
	s.addDerived((*text)(&c.AdminSocket), "admin-socket PATH", "adminSocket", "unix socket for `ambientd status` and its like (default <run-dir>/private/admin.sock)")
	s.addDerived((*text)(&c.SDSSocket), "sds-socket PATH", "sdsSocket", "unix socket of SDS, for proxies of the node (default <run-dir>/sds/sds.sock)")
	s.add((*text)(&c.ZDSSocket), "zds-socket PATH", "zdsSocket", "unix socket at which node proxies connect")
	s.addDerived((*text)(&c.HTTPAddr), "http-addr HOST:PORT", "httpAddr", "/metrics, /healthz and /readyz (default: not served)")
	s.add((*text)(&c.ProcRoot), "proc-root DIR", "procRoot", "the /proc of the host, to find the network namespaces of running pods")
	s.addDerived((*text)(&c.CRISocket), "cri-socket PATH", "criSocket", "the container runtime's socket, asked first for those (default: not asked)")
}

func (s *settings) addSelection() {
	c := &s.cfg
	s.flags.group("Pods")
	s.addDerived((*text)(&c.PodsFrom), "pods-from SOURCE", "podsFrom", "where pods are described: kubernetes, or manifests=DIR for Pod and Namespace YAML (required)")
	s.addDerived((*text)(&c.Kubeconfig), "kubeconfig PATH", "kubeconfig", "how to reach the API server (default: by the service account of the agent's pod)")
	s.add((*list)(&c.ExcludeNamespaces), "exclude-namespaces LIST", "excludeNamespaces", "namespaces that are never in the mesh")
	s.add((*text)(&c.AgentNamespace), "agent-namespace NAME", "agentNamespace", "namespace of the agent, the node proxy and the CA")
	s.add((*list)(&c.OwnPods), "own-pods LIST", "ownPods", "name patterns of those pods, which are never in the mesh")
	s.addDerived((*list)(&c.AllowedPodOptions), "allowed-pod-options LIST", "allowedPodOptions",
		"annotations ambientd.io/... by which a pod's author may take traffic out of mTLS: "+strings.Join(workload.AllowableOptions(), ", ")+" (default: none)")
}

func (s *settings) addRedirection() {
	c := &s.cfg
	s.flags.group("Redirection")
	s.add((*text)(&c.Redirection), "redirection BACKEND", "redirection", "auto (probes), nftables or iptables")
	s.add((*boolean)(&c.DNSCapture), "dns-capture", "dnsCapture", "send pods' DNS to the node proxy, where a pod does not say otherwise")
	s.add((*boolean)(&c.IPv6), "ipv6", "ipv6", "redirect IPv6 too, where a pod has it")
	s.add((*text)(&c.IPv6Uncaptured), "ipv6-uncaptured WHAT", "ipv6Uncaptured", "what becomes of a pod's IPv6 where it is not redirected: drop or allow")
	s.add((*text)(&c.ExistingConnections), "existing-connections WHAT", "existingConnections",
		"of pods enrolled while they run: keep (uncaptured until they end) or reset")
	s.add((*duration)(&c.AuditInterval), "audit-interval DURATION", "auditInterval", "how often each pod is compared with the kernel, and repaired; changes are noticed at once besides")
	s.add((*text)(&c.OnRepair), "on-repair WHAT", "onRepair", "traffic that would be uncaptured while iptables rules are replaced: drop or allow; nftables has no such moment")
	s.add((*address)(&c.ProbeSourceIPv4), "probe-source-ipv4 ADDRESS", "probeSourceIPv4", "source of the node's probes, as pods see them")
	s.add((*address)(&c.ProbeSourceIPv6), "probe-source-ipv6 ADDRESS", "probeSourceIPv6", "the same for IPv6")
	s.add((*text)(&c.ProbeScope), "probe-scope SCOPE", "probeScope", "which connections of the node are probes: pod (all to a pod) or declared (to ports of the pod's probes)")
}

func (s *settings) addCertificates() {
	c := &s.cfg
	s.flags.group("Identities and certificates")
	s.add((*text)(&c.TrustDomain), "trust-domain NAME", "trustDomain", "of all identities")
	s.add((*text)(&c.CA), "ca CA", "ca", "who signs: builtin, its key in memory only")
	s.add((*text)(&c.CertHolder), "cert-holder WHO", "certHolder", "who makes and keeps keys: agent")
	s.add((*duration)(&c.CertTTL), "cert-ttl DURATION", "certTTL", "lifetime to ask for; renewed at about half of it")
	s.add((*integer)(&c.CertWorkers), "cert-workers NUMBER", "certWorkers", "requests to the CA at once")
	s.add((*duration)(&c.CertLinger), "cert-linger DURATION", "certLinger", "how long a key outlives its last pod")
}

func (s *settings) addTimeouts() {
	c := &s.cfg
	s.flags.group("Waiting")
	s.add((*duration)(&c.PluginTimeout), "plugin-timeout DURATION", "pluginTimeout", "the plugin's own timeout, as its CNI configuration has it")
	s.add((*duration)(&c.AddTimeout), "add-timeout DURATION", "addTimeout", "for a whole ADD; less than the plugin's")
	s.add((*duration)(&c.LookupTimeout), "lookup-timeout DURATION", "lookupTimeout", "within it, for reading a pod at the API server that is not known yet")
	s.add((*duration)(&c.ProxyTimeout), "proxy-timeout DURATION", "proxyTimeout", "within it, for a node proxy and its ack")
	s.add((*duration)(&c.CertWait), "cert-wait DURATION", "certWait", "within it, for the certificate; past it the pod starts without")
	s.add((*duration)(&c.DelProxyWait), "del-proxy-wait DURATION", "delProxyWait", "within a DEL, for the node proxy's ack")
}
