// SPDX-License-Identifier: Apache-2.0

// Package cgroup reads which pod a process belongs to from its /proc/PID/cgroup
// (cgroups(7)), in version 1 and version 2.
//
// The kubelet makes one cgroup for each pod and names it by the pod's UID; what
// the container runtime puts below is of no interest here, so containerd, CRI-O
// and cri-dockerd need no telling apart. The two cgroup drivers of the kubelet
// (pkg/kubelet/cm/cgroup_manager_linux.go) spell the name differently:
//
//	cgroupfs  .../kubepods/burstable/pod52f3c1f0-87a4-4a3c-9c1f-2f5d0a6f3b11/...
//	systemd   .../kubepods-burstable-pod52f3c1f0_87a4_4a3c_9c1f_2f5d0a6f3b11.slice/...
//
// It refuses to believe what a workload can make up: the outermost pod of a path
// counts, since a container may be allowed to make cgroups below its own, and a
// login session's cgroups count for nothing. A path is a claim all the same; the
// caller compares it with what else it knows of the pod.
package cgroup

import "bytes"

// maxUID bounds a UID, in bytes. A UUID has 36, the hash that a static pod has for a
// UID has 32; a longer one may come from a manifest.
const maxUID = 128

// PodUID returns the UID of the pod whose cgroup content, that of /proc/PID/cgroup,
// shows, and false if it shows none. It shows none either if its lines, one for each
// hierarchy of version 1, name different pods.
func PodUID(content []byte) (string, bool) {
	var first, next [maxUID]byte
	found := 0 // the length of the UID in first
	for line := range bytes.Lines(content) {
		n := podOfLine(bytes.TrimSuffix(line, []byte{'\n'}), &next)
		switch {
		case n == 0:
		case found == 0:
			found, first = n, next
		case !bytes.Equal(first[:found], next[:n]):
			return "", false
		}
	}
	return string(first[:found]), found > 0
}

// podOfLine writes to uid which pod one line names and returns its length, or 0.
// A line is "hierarchy:controllers:path", and the path may hold colons.
func podOfLine(line []byte, uid *[maxUID]byte) int {
	_, line, ok1 := bytes.Cut(line, []byte{':'})
	_, path, ok2 := bytes.Cut(line, []byte{':'})
	if !ok1 || !ok2 || len(path) == 0 || path[0] != '/' {
		return 0
	}
	// The two components before the one that is looked at.
	var grandparent, parent []byte
	for component := range bytes.SplitSeq(path[1:], []byte{'/'}) {
		// systemd delegates a session's cgroups to its user, who may name the ones
		// below as he likes. A rootless kubelet has a cgroup namespace, in which its
		// paths begin below the session.
		if string(component) == "user.slice" {
			return 0
		}
		name := slicePod(component)
		if name == nil && holdsPods(grandparent, parent) {
			name, _ = bytes.CutPrefix(component, []byte("pod"))
			if len(name) == len(component) {
				name = nil
			}
		}
		if n := copyUID(name, uid); n > 0 {
			return n
		}
		grandparent, parent = parent, component
	}
	return 0
}

// holdsPods says whether the cgroup parent is one in which the cgroupfs driver makes
// the cgroups of pods: that of a quality of service, or of all pods ("kubepods") for
// guaranteed ones. Seen from the agent's own cgroup namespace, a sibling's path begins
// with as many ".." as lead to what the two have in common, so any of it may be hidden.
func holdsPods(grandparent, parent []byte) bool {
	switch string(parent) {
	case "burstable", "besteffort":
		parent = grandparent
	}
	return string(parent) == "kubepods" || string(parent) == ".."
}

// slicePod returns the escaped UID in a pod's slice as the systemd driver names it, or
// nil. The name holds those of all slices above, joined by dashes ("kubelet-kubepods-
// burstable-podUID.slice"), so it suffices by itself. Where containerd has the cgroupfs
// driver and the kubelet the other, the name is not a slice but a part of a longer
// one ("kubepods-podUID.slice:cri-containerd:ID").
func slicePod(component []byte) []byte {
	name, rest, ok := bytes.Cut(component, []byte(".slice"))
	if !ok || len(rest) > 0 && rest[0] != ':' {
		return nil
	}
	for _, level := range []string{"kubepods-burstable-pod", "kubepods-besteffort-pod", "kubepods-pod"} {
		// A prefix of the kubelet's cgroup root ends with a dash.
		before, uid, ok := bytes.Cut(name, []byte(level))
		if ok && (len(before) == 0 || before[len(before)-1] == '-') {
			return uid
		}
	}
	return nil
}

// copyUID writes name to uid and returns its length, or 0 if it is no UID. The systemd
// driver has '_' for '-', which is a separator in a slice's name.
func copyUID(name []byte, uid *[maxUID]byte) int {
	if len(name) == 0 || len(name) > maxUID {
		return 0
	}
	for i, c := range name {
		switch {
		case c == '_':
			c = '-'
		case c == '-', c == '.', '0' <= c && c <= '9', 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z':
		default:
			return 0
		}
		uid[i] = c
	}
	return len(name)
}
