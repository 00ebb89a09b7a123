#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
#
# Fetching, the cache, and what the script's options say.
# shellcheck disable=SC2154,SC2030,SC2031 # bats sets output, stderr, status; a test's exports end with it

load helper

@test "ztunnel is fetched, checked, and pointed at" {
	elf "$(ztunnel_file)" amd64
	ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-$version"
	cmp "$tree/out/amd64/ztunnel" "$(ztunnel_file)"
	[ "$(readlink "$tree/out/amd64/ztunnel")" = "ztunnel-$version" ]
	[ "$(asked)" -eq 1 ]
	# A hash that nobody knew is printed, and kept.
	sum=$(sha256sum <"$(ztunnel_file)")
	[[ $stderr == *"${sum%% *}"* ]]
	grep -F "${sum%% *}" "$tree/out/amd64/ztunnel-$version.sha256"
	# Nothing else is left, and no progress was shown to what is no terminal.
	[ "$(find "$tree/out" -mindepth 1 | wc -l)" -eq 4 ]
	[ "$(wc -l <<<"$stderr")" -eq 1 ]
}

@test "a real program of this machine is taken" {
	cp "$BASH" "$files/ztunnel-$version-$(TARGET_ARCH='' host_arch)"
	TARGET_ARCH='' ztunnel ok
	succeeds "$tree/out/$(host_arch)/ztunnel-$version"
}

host_arch() {
	case $(uname -m) in
		x86_64) echo amd64 ;;
		aarch64) echo arm64 ;;
	esac
}

@test "nothing is fetched twice, and a warm cache needs neither network nor gcloud" {
	elf "$(ztunnel_file)" amd64
	ztunnel ok
	before
	ARTIFACT_AUTH=auto ISTIO_ZTUNNEL_BASE_URL=https://localhost:1/gone ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-$version"
	left_nothing
	[ "$(wc -l <"$STATE/curl.argv")" -eq 1 ]
	[ ! -s "$STATE/gcloud.argv" ]
	[ -z "$stderr" ]
}

@test "a warm cache that nobody may write to is fine" {
	elf "$(ztunnel_file)" amd64
	ztunnel ok
	chmod -R a-w "$tree/out"
	ztunnel ok
	chmod -R u+w "$tree/out"
	succeeds "$tree/out/amd64/ztunnel-$version"
	[ "$(asked)" -eq 1 ]
}

@test "versions and architectures are kept apart, and the link is at the last" {
	elf "$(ztunnel_file)" amd64
	elf "$files/ztunnel-abc-amd64" amd64 5000
	elf "$files/ztunnel-$version-arm64" arm64
	ztunnel ok
	ZTUNNEL_VERSION=abc ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-abc"
	[ "$(readlink "$tree/out/amd64/ztunnel")" = ztunnel-abc ]
	TARGET_ARCH=aarch64 ztunnel ok
	succeeds "$tree/out/arm64/ztunnel-$version"
	ztunnel ok
	[ "$(readlink "$tree/out/amd64/ztunnel")" = "ztunnel-$version" ]
	[ "$(asked)" -eq 3 ]
}

@test "a debug build has a name of its own" {
	elf "$(ztunnel_file)" amd64
	elf "$files/ztunnel-debug-$version-amd64" amd64 6000
	ztunnel ok
	DEBUG=1 ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-$version-debug"
	cmp "$tree/out/amd64/ztunnel" "$files/ztunnel-debug-$version-amd64"
}

@test "where there is no debug build, the error says how to get one" {
	DEBUG=1 ztunnel ok
	fails "ztunnel-debug-$version-amd64" 404 BUILD_ZTUNNEL=1
}

@test "a cached file that was damaged is fetched again" {
	elf "$(ztunnel_file)" amd64
	ztunnel ok
	printf 'x' >>"$tree/out/amd64/ztunnel-$version"
	ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-$version"
	[[ $stderr == *"is not what was fetched once"* ]]
	cmp "$tree/out/amd64/ztunnel-$version" "$(ztunnel_file)"
}

@test "a known hash must fit" {
	elf "$(ztunnel_file)" amd64
	sum=$(sha256sum <"$(ztunnel_file)")
	ZTUNNEL_SHA256=${sum%% *} ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-$version"
	[ -z "$stderr" ]
	rm -r "$tree/out"
	ZTUNNEL_SHA256=${sum:1:63}0 ztunnel ok
	fails "$(base ok)/ztunnel-$version-amd64" "${sum%% *}" "not the known"
}

@test "a hash in common.sh is used for the pinned version and no other" {
	sed -i "s/^\tZTUNNEL_PIN=.*/\tZTUNNEL_PIN=$version \\\\/; s/\(ZTUNNEL_PIN_SHA256_amd64\)=''/\1=$(printf '%064d' 7)/" "$tree/common.sh"
	elf "$(ztunnel_file)" amd64
	elf "$files/ztunnel-abc-amd64" amd64
	ztunnel ok --dry-run
	[[ $output == *"$(printf '%064d' 7)"* ]]
	ZTUNNEL_VERSION='' ztunnel ok
	fails "not the known $(printf '%064d' 7)"
	ZTUNNEL_VERSION=abc ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-abc"
}

@test "another file of the same name is refused after the cache is gone: its hash was kept" {
	elf "$(ztunnel_file)" amd64
	ztunnel ok
	rm "$tree/out/amd64/ztunnel-$version" "$tree/out/amd64/ztunnel"
	elf "$(ztunnel_file)" amd64 4096 changed
	before
	ztunnel ok
	fails "when it was fetched before" "ztunnel-$version.sha256"
}

@test "two runs at once fetch once" {
	elf "$(ztunnel_file)" amd64 2000000
	export ISTIO_ZTUNNEL_BASE_URL
	ISTIO_ZTUNNEL_BASE_URL=$(base ok)
	"$tree/tools/download-ztunnel.sh" >"$STATE/one" 2>"$STATE/one.errors" 3>&- &
	first=$!
	"$tree/tools/download-ztunnel.sh" >"$STATE/two" 2>"$STATE/two.errors" 3>&-
	wait "$first"
	cmp "$STATE/one" "$STATE/two"
	[ "$(asked)" -eq 1 ]
	cmp "$tree/out/amd64/ztunnel" "$(ztunnel_file)"
}

@test "a file:// base is copied from" {
	elf "$(ztunnel_file)" amd64
	ISTIO_ZTUNNEL_BASE_URL=file://$files/ ARTIFACT_AUTH=auto ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-$version"
	cmp "$tree/out/amd64/ztunnel" "$(ztunnel_file)"
	[ ! -s "$STATE/curl.argv" ]
	[ ! -s "$STATE/gcloud.argv" ]
	rm -r "$tree/out"
	ISTIO_ZTUNNEL_BASE_URL=file://localhost/nowhere ztunnel ok
	fails "file:///nowhere/ztunnel-$version-amd64" "no such file"
	ARTIFACT_MAX_BYTES=100 ISTIO_ZTUNNEL_BASE_URL=file://$files ztunnel ok
	fails "larger than 100 bytes"
}

@test "a base with slashes at its end, and one with a query" {
	elf "$(ztunnel_file)" amd64
	ISTIO_ZTUNNEL_BASE_URL="$(base ok)//?X-Signature=presigned-secret" ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-$version"
	[ "$(asked_with path)" = "/ok/$id/ztunnel-$version-amd64" ]
	[ "$(asked_with query)" = X-Signature=presigned-secret ]
	no_secret
}

@test "BUILD_ZTUNNEL=1 builds a checkout with cargo" {
	repo=$BATS_TEST_TMPDIR/ztunnel
	mkdir "$repo"
	touch "$repo/Cargo.toml"
	elf "$repo/source" amd64
	export BUILD_ZTUNNEL=1 ZTUNNEL_REPO=$repo
	ztunnel ok --dry-run
	[[ $output == *"cargo build in $repo"* ]]
	[ ! -s "$STATE/cargo.argv" ]
	ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-built"
	cmp "$tree/out/amd64/ztunnel" "$repo/source"
	[ "$(cat "$STATE/cargo.argv")" = "$repo: build --release --target-dir $repo/out/rust" ]
	# Again: cargo knows what has changed.
	elf "$repo/source" amd64 4096 changed
	ztunnel ok
	cmp "$tree/out/amd64/ztunnel" "$repo/source"
	DEBUG=1 ztunnel ok
	[ "$(tail -n 1 "$STATE/cargo.argv")" = "$repo: build --target-dir $repo/out/rust" ]
	[ "$(asked)" -eq 0 ]
}

@test "BUILD_ZTUNNEL=1 for another architecture asks cargo for it" {
	[ "$(host_arch)" = amd64 ] && other=arm64 triple=aarch64 || other=amd64 triple=x86_64
	repo=$BATS_TEST_TMPDIR/ztunnel
	mkdir "$repo"
	touch "$repo/Cargo.toml"
	elf "$repo/source" "$other"
	BUILD_ZTUNNEL=1 ZTUNNEL_REPO=$repo TARGET_ARCH=$other ztunnel ok
	succeeds "$tree/out/$other/ztunnel-built"
	[[ $(cat "$STATE/cargo.argv") == *" --target $triple-unknown-linux-gnu "* ]]
}

@test "a build that fails, and one of nothing, say so" {
	export BUILD_ZTUNNEL=1
	ztunnel ok
	fails "ZTUNNEL_REPO" "istio/ztunnel"
	repo=$BATS_TEST_TMPDIR/ztunnel
	mkdir "$repo"
	ZTUNNEL_REPO=$repo ztunnel ok
	fails "no Cargo.toml"
	touch "$repo/Cargo.toml"
	ZTUNNEL_REPO=$repo ztunnel ok
	fails "cargo build in $repo"
	echo "no program" >"$repo/source"
	ZTUNNEL_REPO=$repo ztunnel ok
	fails "not an ELF binary"
}

@test "--help names every variable, and fetches nothing" {
	for option in --help -h; do
		ztunnel ok "$option"
		[ "$status" -eq 0 ]
		for word in ISTIO_ZTUNNEL_BASE_URL ARTIFACT_AUTH token-file= ZTUNNEL_VERSION TARGET_ARCH DEBUG BUILD_ZTUNNEL \
			ZTUNNEL_REPO --dry-run --print-path; do
			[[ $output == *"$word"* ]]
		done
	done
	envoy ok --help
	[[ $output == *ISTIO_ENVOY_BASE_URL* && $output == *ENVOY_VERSION* && $output != *BUILD* ]]
	[ ! -e "$tree/out" ]
}

@test "--print-path prints the path and fetches nothing" {
	ztunnel ok --print-path
	[ "$status" -eq 0 ]
	[ "$output" = "$tree/out/amd64/ztunnel-$version" ]
	[ ! -e "$tree/out" ]
	[ "$(asked)" -eq 0 ]
}

@test "--dry-run says what, from where, and with which kind of auth, and asks nobody" {
	unset ZTUNNEL_VERSION ARTIFACT_AUTH
	ISTIO_ZTUNNEL_BASE_URL='' ztunnel ok --dry-run
	[ "$status" -eq 0 ]
	[[ $output == *"https://storage.googleapis.com/istio-build/ztunnel/ztunnel-99b000df4d0f48fc75309aae894cc609ef96fa09-amd64"* ]]
	[[ $output == *"none: a public mirror"* ]]
	ISTIO_ZTUNNEL_BASE_URL='https://private.example/z?sig=presigned-secret' ztunnel ok --dry-run
	[[ $output == *"https://private.example/z/ztunnel-"* && $output == *"token of gcloud"* ]]
	no_secret
	printf '%s' "$token" >"$BATS_TEST_TMPDIR/secret"
	ISTIO_ZTUNNEL_BASE_URL=https://private.example/z ARTIFACT_AUTH=token-file=$BATS_TEST_TMPDIR/secret ztunnel ok --dry-run
	[[ $output == *"token in the file $BATS_TEST_TMPDIR/secret"* ]]
	no_secret
	ISTIO_ZTUNNEL_BASE_URL=s3://bucket/z ztunnel ok --dry-run
	[[ $output == *"s3://bucket/z/ztunnel-"* && $output == *"presigned by aws"* ]]
	[ ! -s "$STATE/gcloud.argv" ]
	[ ! -s "$STATE/aws.argv" ]
	[ ! -s "$STATE/curl.argv" ]
	[ ! -e "$tree/out" ]
}

@test "what makes no sense is refused before anything is asked" {
	run --separate-stderr "$tree/tools/download-ztunnel.sh" "https://mirror.example/?token=$token"
	[ "$status" -eq 2 ]
	[[ $stderr == "error: this takes --dry-run, "*"tools/download-ztunnel.sh --help)" ]]
	no_secret
	TARGET_ARCH=riscv64 ztunnel ok
	fails riscv64 "amd64 or arm64"
	ZTUNNEL_VERSION=../../etc ztunnel ok
	fails "ZTUNNEL_VERSION is not a version"
	ZTUNNEL_SHA256=abc ztunnel ok
	fails "not a SHA-256"
	ARTIFACT_AUTH=password=x ztunnel ok
	fails "token-file=PATH"
	ARTIFACT_MAX_BYTES=many ztunnel ok
	fails ARTIFACT_MAX_BYTES
	ARTIFACT_STALL_SECONDS=-1 ztunnel ok
	fails ARTIFACT_STALL_SECONDS
	ISTIO_ZTUNNEL_BASE_URL=http://localhost/z ztunnel ok
	fails http://localhost/z "https://"
	ISTIO_ZTUNNEL_BASE_URL=localhost ztunnel ok
	fails ISTIO_ZTUNNEL_BASE_URL "HOST/PATH"
	ISTIO_ZTUNNEL_BASE_URL="https://me:$token@localhost/z" ztunnel ok
	fails ISTIO_ZTUNNEL_BASE_URL token-file=PATH
	ISTIO_ZTUNNEL_BASE_URL=$'https://localhost/z"\noutput = "/etc/passwd' ztunnel ok
	fails "is not an URL"
	[ ! -s "$STATE/curl.argv" ]
}

@test "progress is shown on a terminal, and only there" {
	elf "$(ztunnel_file)" amd64 2000000
	ISTIO_ZTUNNEL_BASE_URL=$(base ok) run script -qec "$tree/tools/download-ztunnel.sh" /dev/null
	[ "$status" -eq 0 ]
	[[ $output == *"100"*"%"* ]]
	grep -e '--progress-bar' "$STATE/curl.argv"
}

@test "what lies in the way of the link or the binary is an error, not overwritten" {
	elf "$(ztunnel_file)" amd64
	mkdir -p "$tree/out/amd64/ztunnel/full"
	ztunnel ok
	[ "$status" -eq 1 ]
	[[ $stderr == *"cannot make $tree/out/amd64/ztunnel point at"* ]]
	[ -d "$tree/out/amd64/ztunnel/full" ]
	rm -r "$tree/out"
	mkdir -p "$tree/out/amd64/ztunnel-$version/full"
	ztunnel ok
	fails "cannot make $tree/out/amd64/ztunnel-$version"
}

@test "a link in place of the cached binary is replaced, what it points at is not" {
	elf "$(ztunnel_file)" amd64
	mkdir -p "$tree/out/amd64"
	printf 'mine\n' >"$BATS_TEST_TMPDIR/mine"
	ln -s "$BATS_TEST_TMPDIR/mine" "$tree/out/amd64/ztunnel-$version"
	ln -s "$BATS_TEST_TMPDIR" "$tree/out/amd64/.ztunnel-$version.part"
	ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-$version"
	[ ! -L "$tree/out/amd64/ztunnel-$version" ]
	[ "$(<"$BATS_TEST_TMPDIR/mine")" = mine ]
}
