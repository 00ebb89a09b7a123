// SPDX-License-Identifier: Apache-2.0

// Package manifests owns the pod source for machines without an API server: a
// directory of Pod and Namespace manifests. It reads them strictly, follows
// changes, and answers for the directory as it is now: a manifest that was
// written before a lookup counts in it.
//
// It stands in for what an API server does to a new pod (default namespace and
// service account, a UID) and for nothing else. It refuses to write, to read
// below the directory, and to guess: of a file that it cannot read wholly its last
// good version stays in use, for as long as the file is there, so that a slip takes no
// pod out of the mesh. That version is kept in memory alone. Where there is none, it is
// not known whether a pod whose namespace has no other manifest belongs in the mesh.
//
// An empty file counts as one that cannot be read, unless it has just been made.
//
// Of documents for the same pod, the same namespace, or the same UID, the one in
// the file whose name sorts first counts, and within a file the first, whichever
// was written last. The others are ignored, which is logged for each; what else is
// in their files stays in use.
package manifests
