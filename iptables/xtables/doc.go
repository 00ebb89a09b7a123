// SPDX-License-Identifier: Apache-2.0

// Package xtables owns the programs of iptables: which of them a system has, how
// they are run in a netns, and the text that they read and print. It knows the
// kernel's x_tables only by the list of tables that procfs shows.
//
// It refuses to know what rules mean, and to read where there is nothing: the
// x_tables programs make the tables that they are asked about.
//
// # Locks
//
// Work inside a pod's netns takes no lock that anybody else could hold; work in the
// host's takes x_tables' lock as everybody there does, and waits for it only so
// long.
package xtables
