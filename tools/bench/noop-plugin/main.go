// SPDX-License-Identifier: Apache-2.0

// Command noop-plugin is a plugin of the CNI skeleton that does nothing: what any
// plugin costs at least. `make bench` compares ambient-cni with it.
package main

import (
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/version"
)

func main() {
	nothing := func(*skel.CmdArgs) error { return nil }
	skel.PluginMainFuncs(skel.CNIFuncs{Add: nothing, Del: nothing, Check: nothing}, version.All, "noop-plugin")
}
