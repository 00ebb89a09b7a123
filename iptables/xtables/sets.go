// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"errors"
	"fmt"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
)

// ipsetModule is there once the kernel has ipsets. To ask for one before would load
// the module.
const ipsetModule = "/sys/module/ip_set"

// RemoveProbeSets destroys our ipsets in the host's netns, which run enters, and
// reports whether there were any. A set that a rule of somebody's uses stays.
func RemoveProbeSets(run redirection.Runner) (found bool, err error) {
	if _, err := os.Stat(ipsetModule); errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	for _, name := range []string{redirection.ProbeSetIPv4, redirection.ProbeSetIPv6} {
		failure := run(func() error {
			// Destroying one that is not there is no error to the kernel, unless it is asked to make it one.
			if _, err := netlink.IpsetList(name); err != nil {
				return err
			}
			return netlink.IpsetDestroy(name)
		})
		switch {
		case failure == nil:
			found = true
		case errors.Is(failure, unix.ENOENT), errors.Is(failure, nl.IPSetError(nl.IPSET_ERR_BUSY)):
		default:
			err = errors.Join(err, fmt.Errorf("destroying ipset %s: %w", name, failure))
		}
	}
	return found, err
}
