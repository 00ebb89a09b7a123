// SPDX-License-Identifier: Apache-2.0

// Command ambient-cni is the CNI plugin of ambientd, chained after a primary plugin. It tells the
// node agent of each pod, hands over the pod's network namespace as a descriptor, and waits for the
// agent's answer; the agent does the work.
//
// It owns the CNI protocol: verbs, versions, network configuration, error codes. It refuses to know
// Kubernetes, to hold a credential, and to enter a network namespace. It runs on every pod start,
// and starting the process is most of what it costs: it imports the CNI skeleton, podevent, spelling
// and the standard library, and nothing that makes these start slower.
//
// What it decides without the agent is which pods must never wait for it: see [podevent.Exclusions] and [config.passesWithoutAgent].
package main

import (
	"fmt"
	"os"

	"github.com/containernetworking/cni/pkg/skel"
	cniversion "github.com/containernetworking/cni/pkg/version"
)

// version is set by the linker (-X main.version=…).
var version = "dev"

func main() {
	os.Exit(run())
}

// run serves the one CNI command that the environment names, and returns the exit status.
func run() int {
	// The skeleton compares CNI_NETNS with the plugin's own namespace only after ADD has been done, and
	// on DEL turns an agent's own pod in the host's network into an error. openNetns does it before.
	if err := os.Setenv("CNI_NETNS_OVERRIDE", "1"); err != nil {
		fmt.Fprintln(os.Stderr, "ambient-cni: setting CNI_NETNS_OVERRIDE:", err)
		return 1
	}
	cniErr := skel.PluginMainFuncsWithError(
		skel.CNIFuncs{Add: add, Del: del, Check: check, GC: gc, Status: status},
		cniversion.PluginSupports(supportedVersions()...),
		"ambient-cni "+version+": chains pods into the ambient mesh by asking ambientd; called by container runtimes")
	if cniErr == nil {
		return 0
	}
	// The CNI specification wants the error on standard output.
	if err := cniErr.Print(); err != nil {
		fmt.Fprintln(os.Stderr, "ambient-cni: printing the error:", err)
	}
	return 1
}

// supportedVersions are the versions of the CNI specification that the plugin was tested with,
// rather than the library's list, which grows by itself. Chaining came with 0.3.
func supportedVersions() []string {
	return []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"}
}
