// SPDX-License-Identifier: Apache-2.0

// Package admin owns what the agent tells its operators: the status that it
// serves on a unix socket, the client and the table that show it, and the health
// endpoints for a kubelet.
//
// It refuses to change anything and to know where a status comes from: it is
// given a function. Who may connect is decided by the listener it is given.
package admin
