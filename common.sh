#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Shell functions that the Makefile, .ci/run and the scripts below tools/ share:
# what the machine must have, where tools that are built once are kept, and which
# versions of other projects' binaries tools/download-*.sh fetch.
# To be sourced, or run as `common.sh FUNCTION ARGUMENT...`. Everything that is
# said to a person goes to standard error; standard output carries results only.

# The oldest Go that go.mod's language version allows.
readonly MIN_GO=1.26
# The first kernel with SO_NETNS_COOKIE, by which network namespaces are told apart.
readonly MIN_KERNEL=5.14

# What tools/download-ztunnel.sh and tools/download-envoy.sh fetch unless told otherwise:
# the commits of istio/ztunnel and istio/proxy that Istio 1.29.2 was released with, as
# both binaries of that release report them. A SHA-256 is of the file that is downloaded
# (Envoy's is an archive); one that is empty is not known for certain: nobody may guess.
# shellcheck disable=SC2034 # used by those scripts
readonly PINNED_FROM="Istio 1.29.2" \
	ZTUNNEL_PIN=99b000df4d0f48fc75309aae894cc609ef96fa09 \
	ZTUNNEL_PIN_SHA256_amd64='' \
	ZTUNNEL_PIN_SHA256_arm64='' \
	ENVOY_PIN=af30be60b7c35f2aceaea1b7382c7fbf12aa5e67 \
	ENVOY_PIN_SHA256_amd64='' \
	ENVOY_PIN_SHA256_arm64=''

say() { printf '%s\n' "$*" >&2; }

die() {
	say "error: $*"
	exit 1
}

# at_least HAVE WANT: whether dotted version HAVE is WANT or newer.
at_least() {
	[ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

# find_go puts the usual place of a Go that was unpacked by hand on PATH, for
# shells that read no profile.
find_go() {
	if ! command -v go >/dev/null && [ -x /usr/local/go/bin/go ]; then
		PATH=$PATH:/usr/local/go/bin
		export PATH
	fi
}

# require_go dies unless the go command is there and new enough.
require_go() {
	find_go
	command -v go >/dev/null ||
		die "no go command found: install Go $MIN_GO or newer (https://go.dev/dl/) and put its bin directory on PATH"
	local version
	version=$(go env GOVERSION)
	version=${version#go}
	at_least "${version%%[!0-9.]*}" "$MIN_GO" ||
		die "Go $version is too old: ambientd needs Go $MIN_GO or newer (https://go.dev/dl/)"
}

# require_kernel dies unless this is Linux and new enough.
require_kernel() {
	[ "$(uname -s)" = Linux ] || die "this needs Linux: network namespaces are what it is about"
	local release
	release=$(uname -r)
	at_least "${release%%[!0-9.]*}" "$MIN_KERNEL" ||
		die "kernel $release is too old: ambientd needs Linux $MIN_KERNEL or newer (SO_NETNS_COOKIE)"
}

# require_commands COMMAND:PACKAGE...: makes sure that every command is there. What is
# missing is installed with apt-get where that is possible (as root, on Debian
# and its kin); elsewhere the function dies and names all that is missing.
require_commands() {
	local pair missing=() packages=()
	# Debian keeps iptables and nft where an ordinary user's PATH does not look.
	PATH=$PATH:/usr/sbin:/sbin
	for pair in "$@"; do
		command -v "${pair%%:*}" >/dev/null && continue
		missing+=("${pair%%:*}")
		packages+=("${pair#*:}")
	done
	[ ${#missing[@]} -gt 0 ] || return 0
	if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
		die "missing: ${missing[*]}. Install them; on Debian, as root: apt-get install ${packages[*]}"
	fi
	say "installing: ${packages[*]}"
	apt_install "${packages[@]}"
	for pair in "$@"; do
		command -v "${pair%%:*}" >/dev/null ||
			die "${pair%%:*} is still missing after installing the package ${pair#*:}"
	done
}

# apt_install PACKAGE...: installs Debian packages without asking anything, and without
# starting the services that some of them bring: only their programs are wanted.
apt_install() {
	export DEBIAN_FRONTEND=noninteractive
	local install=(apt-get install -y -q --no-install-recommends "$@")
	local policy=/usr/sbin/policy-rc.d ours='' failed=''
	if [ ! -e "$policy" ]; then
		ours=$policy
		printf '#!/bin/sh\nexit 101\n' >"$policy"
		chmod 755 "$policy"
	fi
	# The package lists of a fresh machine are empty or old: fetch them only
	# where the first attempt shows that they are.
	"${install[@]}" >&2 ||
		{ apt-get update -q >&2 && "${install[@]}" >&2; } || failed=yes
	[ -z "$ours" ] || rm -f "$ours"
	[ -z "$failed" ] || die "apt-get could not install $*: see above"
}

# require_race makes sure that Go's race detector can be used: it needs cgo, which
# needs a C compiler and the C library's headers.
require_race() {
	require_commands gcc:gcc
	require_file /usr/include/stdio.h libc6-dev
}

# require_file FILE PACKAGE: like require_commands, for what is no command.
require_file() {
	[ ! -e "$1" ] || return 0
	if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
		die "missing: $1. Install it; on Debian, as root: apt-get install $2"
	fi
	say "installing: $2"
	apt_install "$2"
}

# cache_dir prints where built tools are kept, outside of any checkout.
cache_dir() {
	if [ -n "${XDG_CACHE_HOME:-}" ]; then
		printf '%s\n' "$XDG_CACHE_HOME/ambientd"
	else
		[ -n "${HOME:-}" ] || die "neither HOME nor XDG_CACHE_HOME is set: no place to keep built tools"
		printf '%s\n' "$HOME/.cache/ambientd"
	fi
}

# build_tools MODULE_DIRECTORY: builds the tools that the module's go.mod names, unless
# that was done before, and prints the directory that holds them. They are kept by
# the module's exact versions and by Go's, so an update of either makes new ones.
build_tools() {
	require_go
	local module=$1 name sum dir fresh
	name=$(basename "$module")
	sum=$(cat "$module/go.mod" "$module/go.sum" | sha256sum)
	dir=$(cache_dir)/$name/$(go env GOVERSION)-$(go env GOARCH)-${sum:0:12}
	if [ ! -d "$dir" ]; then
		say "building the tools of $module once, into $dir"
		mkdir -p "$(dirname "$dir")"
		fresh=$(mktemp -d "$dir.XXXXXX")
		if ! CGO_ENABLED=0 go -C "$module" build -trimpath -ldflags '-s -w' -o "$fresh/" tool >&2; then
			rm -rf "$fresh"
			die "building the tools of $module: see above"
		fi
		chmod 755 "$fresh"
		# Whoever built the same at the same time and was first, wins.
		mv -T "$fresh" "$dir" 2>/dev/null || rm -rf "$fresh"
	fi
	printf '%s\n' "$dir"
}

# compile_tests PACKAGE...: compiles what the tests of the packages need, and says how far that
# has come: on a fresh clone go test would say nothing for minutes. What cannot be compiled,
# go test tells.
compile_tests() {
	say "compiling $* and all that they need, which takes minutes the first time"
	CGO_ENABLED=1 go list -race -test -export -v "$@" 2>&1 >/dev/null |
		awk 'NF && ++n % 100 == 0 { print "compiled: " n " packages"; fflush() }' >&2 || true
	say "testing: each package is told when it and those before it are done"
}

# tell_sizes FILE...: says how large the files are.
tell_sizes() {
	local file
	for file in "$@"; do
		say "$file: $(stat -c %s "$file" | numfmt --to=si --round=nearest --format=%.1f --suffix=B)"
	done
}

# api_test_packages prints the packages that have tests against an API server: those with
# the build tag apitest.
api_test_packages() {
	grep -rlE --include='*_test.go' --exclude-dir=out '^//go:build (.*[^a-z])?apitest' . |
		sed 's#/[^/]*$##' | sort -u
}

# require_node_proxy NAME ARCHITECTURE: dies unless NAME is a node proxy for which the end-to-end
# tests have an image and a manifest.
require_node_proxy() {
	case $1 in
		devproxy) ;;
		ztunnel)
			[ -x "out/$2/ztunnel" ] ||
				die "NODE_PROXY=ztunnel needs out/$2/ztunnel, which is not there: make ztunnel fetches it"
			;;
		*) die "NODE_PROXY=$1 is not known: devproxy or ztunnel" ;;
	esac
}

# copy_tree DESTINATION: copies the checkout as it is in the work tree, without git's
# own files and without what was built.
copy_tree() {
	tar -cf - --exclude=./.git --exclude=./bin --exclude=./out . |
		tar -xf - --no-same-owner -C "$1"
}

# lint_format dies with the names of the Go files that gofmt would change.
lint_format() {
	find_go
	local unformatted
	unformatted=$(find . -name '*.go' -not -path './out/*' -exec gofmt -l {} +)
	[ -z "$unformatted" ] || die "not formatted, run gofmt -w on: ${unformatted//$'\n'/ }"
}

# generate DIRECTORY: writes the generated code of the checkout in DIRECTORY anew.
# protoc comes from Debian; the go:generate lines build its Go plugin themselves, in the
# version of go.mod.
generate() {
	require_go
	require_commands protoc:protobuf-compiler
	go -C "$1" generate ./... >&2 || die "go generate: see above"
}

# check_generated dies if generating anew, in a copy, changes anything. A protoc of
# another version than the one of the committed code is told apart from stale code.
check_generated() {
	local copy difference
	copy=$(mktemp -d)
	copy_tree "$copy"
	("$0" generate "$copy") || {
		rm -rf "$copy"
		die "could not generate: see above"
	}
	difference=$(diff -r -u --exclude=.git --exclude=bin --exclude=out . "$copy") || {
		rm -rf "$copy"
		say "$difference"
		die "generated code is stale, or made with another protoc ($(protoc --version)): run make generate"
	}
	rm -rf "$copy"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
	set -euo pipefail
	[ $# -gt 0 ] || die "usage: common.sh FUNCTION ARGUMENT..."
	"$@"
fi
