// SPDX-License-Identifier: Apache-2.0

// Package fences holds the tests that keep packages apart: who may import whom,
// who may change a thread's network namespace, and how large the plugin may get;
// and one that keeps unfinished pages out. Each failure says why the fence stands
// where it does, and of an import along which others it was crossed.
//
// It owns no code of the product. The linter's depguard says some of the same at the
// offending line; only the closures looked at here cannot be fooled by a detour.
package fences
