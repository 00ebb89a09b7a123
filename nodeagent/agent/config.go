// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"log/slog"
	"net/netip"
	"path/filepath"
	"time"

	"ambientd/certfetch"
	"ambientd/cni-plugin/podevent"
	"ambientd/iptables/backend"
	"ambientd/iptables/iptables"
	"ambientd/iptables/redirection"
	"ambientd/nodeagent/enroll"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/workload"
)

// The values that settings of a closed set may have.
const (
	CABuiltin       = "builtin" // in this process, its key in memory only
	CertHolderAgent = "agent"   // keys are made and kept by the agent

	podsFromManifests  = "manifests"
	podsFromKubernetes = "kubernetes"

	LogText = "text"
	LogJSON = "json"
)

// Config is everything that an operator sets. [Default] fills it, [Config.Validate]
// checks it; flags and keys of the configuration file are documented by
// `ambientd run --help`.
type Config struct {
	NodeName string // a DNS name, as Kubernetes has it

	RunDir      string // absolute; on tmpfs, so that a reboot starts clean
	CNISocket   string // empty: below RunDir, as the two next
	AdminSocket string
	SDSSocket   string
	ZDSSocket   string // where node proxies look for it
	HTTPAddr    string // host:port of /metrics, /healthz and /readyz; empty: not served
	ProcRoot    string // where the host's processes show
	CRISocket   string // of the container runtime; empty: it is not asked

	PodsFrom          string // "kubernetes" or "manifests=DIR"
	Kubeconfig        string // absolute path; empty: as a pod of the cluster
	AgentNamespace    string
	OwnPods           []string // patterns of path.Match
	ExcludeNamespaces []string
	Selectors         []workload.SelectorSpec
	AllowedPodOptions []string // those of workload.AllowableOptions that pods' authors may set

	Redirection         string // backend.Auto, NFTables or IPTables
	DNSCapture          bool
	IPv6                bool
	IPv6Uncaptured      string // a redirection.Uncaptured
	ProbeSourceIPv4     netip.Addr
	ProbeSourceIPv6     netip.Addr
	ProbeScope          string        // a redirection.ProbeScope
	OnRepair            string        // an iptables.OnRepair
	ExistingConnections string        // an enroll.ExistingConnections
	AuditInterval       time.Duration // between two regular audits of a pod

	TrustDomain string
	CA          string
	CertHolder  string
	CertTTL     time.Duration // asked of the CA, which may grant less
	CertWorkers int           // requests to the CA at once
	CertLinger  time.Duration // how long a key outlives its last pod

	PluginTimeout time.Duration // what the CNI configuration gives the plugin; every wait of an ADD has to fit in
	AddTimeout    time.Duration // a whole ADD
	LookupTimeout time.Duration // within it, for reading a pod that is not known at the API server
	ProxyTimeout  time.Duration // within it, for a proxy and its ack
	CertWait      time.Duration // within it, for the certificate; past it the pod starts without
	DelProxyWait  time.Duration // within a DEL, for the proxy's ack

	LogLevel  string // debug, info, warn, error
	LogFormat string

	Version string       // of this build, for status
	Logger  *slog.Logger // required by Run

	OnReady func() // called once, when the agent is ready; nil for nothing
}

// Default returns the settings of an agent whose operator sets none. Required
// ones, NodeName and PodsFrom, are empty.
func Default() Config {
	redirect := redirection.DefaultOptions()
	return Config{
		RunDir:    podevent.DefaultRunDir,
		ZDSSocket: "/var/run/ztunnel/ztunnel.sock",
		ProcRoot:  podnetns.DefaultProcRoot,

		AgentNamespace:    podevent.DefaultAgentNamespace,
		OwnPods:           podevent.DefaultOwnPods(),
		ExcludeNamespaces: podevent.DefaultExcludeNamespaces(),
		Selectors:         workload.DefaultSelectors(),

		Redirection:         backend.Auto,
		DNSCapture:          redirect.DNSCapture,
		IPv6:                redirect.IPv6,
		IPv6Uncaptured:      string(redirect.IPv6Uncaptured),
		ProbeSourceIPv4:     redirect.ProbeSourceIPv4,
		ProbeSourceIPv6:     redirect.ProbeSourceIPv6,
		ProbeScope:          string(redirection.ProbeScopePod),
		OnRepair:            string(iptables.RepairDrop),
		ExistingConnections: string(enroll.KeepConnections),
		AuditInterval:       30 * time.Second,

		TrustDomain: "cluster.local",
		CA:          CABuiltin,
		CertHolder:  CertHolderAgent,
		CertTTL:     certfetch.DefaultTTL,
		CertWorkers: certfetch.DefaultWorkers,
		CertLinger:  certfetch.DefaultLinger,

		PluginTimeout: 20 * time.Second,
		AddTimeout:    15 * time.Second,
		LookupTimeout: 2 * time.Second,
		ProxyTimeout:  8 * time.Second,
		CertWait:      3 * time.Second,
		DelProxyWait:  700 * time.Millisecond,

		LogLevel:  "info",
		LogFormat: LogText,
	}
}

// Folders of the run directory. Nobody lists it, but who may use a socket below
// can pass through.
const (
	privateDir = "private" // for root: cni.sock, admin.sock, what is remembered
	sdsDir     = "sds"     // for proxies of the node
)

// CNISocketPath is where the CNI plugin is served.
func (c Config) CNISocketPath() string {
	return cmp.Or(c.CNISocket, filepath.Join(c.RunDir, privateDir, "cni.sock"))
}

// AdminSocketPath is where the status is served.
func (c Config) AdminSocketPath() string {
	return cmp.Or(c.AdminSocket, filepath.Join(c.RunDir, privateDir, "admin.sock"))
}

// SDSSocketPath is where certificates are served to proxies of the node.
func (c Config) SDSSocketPath() string {
	return cmp.Or(c.SDSSocket, filepath.Join(c.RunDir, sdsDir, "sds.sock"))
}

// recordsDir is where the agent remembers pods over a restart.
func (c Config) recordsDir() string { return filepath.Join(c.RunDir, privateDir, "pods") }

// spoolDir is where the plugin leaves events while no agent runs; it finds it below its own runDir.
func (c Config) spoolDir() string { return c.RunDir + podevent.SpoolInRunDir }

// policyFile is what the plugin goes by while no agent runs.
func (c Config) policyFile() string { return c.RunDir + podevent.PolicyInRunDir }

// decisionFile is where the choice of a redirection backend is kept until the next boot.
func (c Config) decisionFile() string { return filepath.Join(c.RunDir, privateDir, "redirection.json") }
