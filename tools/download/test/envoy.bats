#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
#
# Envoy comes in an archive.
# shellcheck disable=SC2154,SC2030,SC2031 # bats sets output, stderr, status; a test's exports end with it

load helper

@test "Envoy is taken out of its archive" {
	elf "$BATS_TEST_TMPDIR/envoy" amd64
	envoy_archive "$files/envoy-alpha-$version.tar.gz" "$BATS_TEST_TMPDIR/envoy"
	envoy ok
	succeeds "$tree/out/amd64/envoy-$version"
	cmp "$tree/out/amd64/envoy" "$BATS_TEST_TMPDIR/envoy"
	# The hash is the archive's.
	sum=$(sha256sum <"$files/envoy-alpha-$version.tar.gz")
	[[ $stderr == *"${sum%% *}"* ]]
	envoy ok
	[ "$(asked)" -eq 1 ]
	rm -r "$tree/out"
	ENVOY_SHA256=${sum%% *} envoy ok
	succeeds "$tree/out/amd64/envoy-$version"
}

@test "its archive has another name for arm64 and for debug builds" {
	elf "$BATS_TEST_TMPDIR/envoy" arm64
	envoy_archive "$files/envoy-alpha-$version-arm64.tar.gz" "$BATS_TEST_TMPDIR/envoy"
	envoy_archive "$files/envoy-debug-$version-arm64.tar.gz" "$BATS_TEST_TMPDIR/envoy" ./usr/local/bin/envoy
	export TARGET_ARCH=arm64
	envoy ok
	succeeds "$tree/out/arm64/envoy-$version"
	DEBUG=1 envoy ok
	succeeds "$tree/out/arm64/envoy-$version-debug"
}

@test "an archive without Envoy, one for another architecture, one that is none" {
	archive=$files/envoy-alpha-$version.tar.gz
	elf "$BATS_TEST_TMPDIR/envoy" arm64
	envoy_archive "$archive" "$BATS_TEST_TMPDIR/envoy" usr/bin/envoy
	envoy ok
	fails "$(base ok)/envoy-alpha-$version.tar.gz" "no file usr/local/bin/envoy"
	envoy_archive "$archive" "$BATS_TEST_TMPDIR/envoy"
	envoy ok
	fails "$(base ok)/envoy-alpha-$version.tar.gz" "for arm64, not for amd64"
	printf 'no archive\n' | gzip >"$archive"
	envoy ok
	fails "no file usr/local/bin/envoy"
	cp "$BATS_TEST_TMPDIR/envoy" "$archive"
	envoy ok
	fails "not a gzip archive"
	envoy html
	fails "$(base html)/envoy-alpha-$version.tar.gz" "an HTML page"
}

@test "an archive that is cut off" {
	elf "$BATS_TEST_TMPDIR/envoy" amd64 100000
	envoy_archive "$files/envoy-alpha-$version.tar.gz" "$BATS_TEST_TMPDIR/envoy"
	truncate -s 300 "$files/envoy-alpha-$version.tar.gz"
	envoy nolength
	fails "$(base nolength)/envoy-alpha-$version.tar.gz" "damaged or truncated"
}

@test "nothing of the archive but that one file reaches the file system" {
	elf "$BATS_TEST_TMPDIR/envoy" amd64
	dir=$BATS_TEST_TMPDIR/evil
	mkdir -p "$dir/usr/local/bin"
	cp "$BATS_TEST_TMPDIR/envoy" "$dir/usr/local/bin/envoy"
	printf 'evil\n' >"$dir/evil"
	ln -s /etc "$dir/link"
	tar -czf "$files/envoy-alpha-$version.tar.gz" -P -C "$dir" --transform "s,^evil$,../../../../../../$STATE/escaped," evil link usr/local/bin/envoy
	tar -tPzf "$files/envoy-alpha-$version.tar.gz" | grep -F ../escaped || tar -tPzf "$files/envoy-alpha-$version.tar.gz" | grep escaped
	envoy ok
	succeeds "$tree/out/amd64/envoy-$version"
	[ ! -e "$STATE/escaped" ]
	[ "$(find "$tree/out" -mindepth 1 | wc -l)" -eq 4 ]
}

@test "an Envoy that is a link in the archive is none" {
	dir=$BATS_TEST_TMPDIR/evil
	mkdir -p "$dir/usr/local/bin"
	ln -s "$BASH" "$dir/usr/local/bin/envoy"
	tar -czf "$files/envoy-alpha-$version.tar.gz" -C "$dir" usr/local/bin/envoy
	envoy ok
	fails "no file usr/local/bin/envoy"
}

@test "an archive that unpacks to far more is refused" {
	sed -i 's/^readonly MAX_UNPACKED=.*/readonly MAX_UNPACKED=1000000/' "$tree/tools/download-envoy.sh"
	elf "$BATS_TEST_TMPDIR/envoy" amd64 2000000
	envoy_archive "$files/envoy-alpha-$version.tar.gz" "$BATS_TEST_TMPDIR/envoy"
	envoy ok
	fails "unpacks to more than 1000000 bytes"
}
