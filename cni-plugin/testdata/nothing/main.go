// SPDX-License-Identifier: Apache-2.0

// Command nothing is a plugin of the CNI skeleton that does nothing: the floor that starting
// ambient-cni is measured against.
package main

import (
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/version"
)

func main() {
	nothing := func(*skel.CmdArgs) error { return nil }
	skel.PluginMainFuncs(
		skel.CNIFuncs{Add: nothing, Del: nothing, Check: nothing, GC: nothing, Status: nothing},
		version.PluginSupports("0.3.1", "0.4.0", "1.0.0", "1.1.0"), "does nothing")
}
