// SPDX-License-Identifier: Apache-2.0

// Package admin owns the agent's dealings with its operators: the status that it
// serves on a unix socket and the operations that it takes there, the client and
// the tables that show them, metrics, and the health endpoints for a kubelet.
//
// It refuses to change anything by itself and to know where a status comes from: it
// is given functions. Who may connect is decided by the listener it is given.
package admin
