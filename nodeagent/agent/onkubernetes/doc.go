// SPDX-License-Identifier: Apache-2.0

// Package onkubernetes holds the tests of the whole agent with a real API server, under
// the role that deploy/ gives it. The test is the kubelet, the container runtime and the
// node proxy; pods are network namespaces.
//
// It owns no code of the product.
package onkubernetes
