#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
#
# Servers and networks that are slow, broken or hostile (case 25).
# shellcheck disable=SC2154,SC2030,SC2031 # bats sets output, stderr, status; a test's exports end with it

load helper

@test "429 and 5xx are tried again, later and later" {
	elf "$(ztunnel_file)" amd64
	for code in 429 500 503; do
		: >"$STATE/sleep.argv"
		ztunnel "status=$code,times=3"
		succeeds "$tree/out/amd64/ztunnel-$version"
		rm -r "$tree/out"
		[ "$(cut -d . -f 1 "$STATE/sleep.argv" | paste -s -d ' ')" = "1 2 4" ]
		[[ $stderr == *"answers $code"*"trying again in 1 s"* ]]
	done
}

@test "a server that stays broken is given up" {
	ztunnel status=502
	fails "$(base status=502)/ztunnel-$version-amd64" 502 "Given up after 6 attempts"
	[ "$(asked)" -eq 6 ]
}

@test "other 4xx are not tried again" {
	for code in 400 401 403 404 408 410 451; do
		ztunnel "status=$code"
		fails "$(base "status=$code")/ztunnel-$version-amd64" "$code"
		[ "$(asked)" -eq 1 ]
		forget
	done
	[ ! -s "$STATE/sleep.argv" ]
}

@test "404 says what to look at" {
	ztunnel ok
	fails "$(base ok)/ztunnel-$version-amd64" 404 "ZTUNNEL_VERSION ($version)" "TARGET_ARCH (amd64)" ISTIO_ZTUNNEL_BASE_URL
}

@test "Retry-After is waited for, as seconds and as a date, and not for ever" {
	elf "$(ztunnel_file)" amd64
	ztunnel status=429,times=1,retry-after=7
	succeeds "$tree/out/amd64/ztunnel-$version"
	[ "$(cut -d . -f 1 "$STATE/sleep.argv")" -eq 7 ]
	rm -r "$tree/out"
	: >"$STATE/sleep.argv"
	ztunnel status=503,times=1,retry-after=date
	succeeds "$tree/out/amd64/ztunnel-$version"
	waited=$(cut -d . -f 1 "$STATE/sleep.argv")
	[ "$waited" -ge 5 ] && [ "$waited" -le 10 ]
	rm -r "$tree/out"
	ztunnel status=429,retry-after=3600
	fails "come back in 3600 seconds"
	# shellcheck disable=SC2016 # as a server would send it
	for odd in -5 x tomorrow 'a[$(touch%20x)]' 99999999999999999999; do
		: >"$STATE/sleep.argv"
		ztunnel "status=503,times=1,retry-after=$odd"
		succeeds "$tree/out/amd64/ztunnel-$version"
		rm -r "$tree/out"
		[ "$(cut -d . -f 1 "$STATE/sleep.argv")" -eq 1 ]
	done
}

@test "nobody listens" {
	ISTIO_ZTUNNEL_BASE_URL=https://localhost:1/z ztunnel ok
	fails https://localhost:1/z/ztunnel- connect "Given up after 6 attempts"
	ISTIO_ZTUNNEL_BASE_URL=https://nowhere.invalid/z ztunnel ok
	fails https://nowhere.invalid/z/ztunnel- resolve
}

@test "a transfer that breaks is resumed where it broke" {
	elf "$(ztunnel_file)" amd64 300000
	ztunnel cut=100000,times=2
	succeeds "$tree/out/amd64/ztunnel-$version"
	cmp "$tree/out/amd64/ztunnel" "$(ztunnel_file)"
	[ "$(asked_with range | paste -s -d ' ')" = " bytes=100000- bytes=200000-" ]
	asked_with if_range
	[[ $(asked_with if_range | tail -n 1) == '\"'*'\"' ]]
}

@test "a stream of HTTP/2 that breaks is resumed too, behind a redirect" {
	elf "$(ztunnel_file)" amd64 300000
	ztunnel redirect=cut
	succeeds "$tree/out/amd64/ztunnel-$version"
	cmp "$tree/out/amd64/ztunnel" "$(ztunnel_file)"
	[ "$(asked_with range | paste -s -d ' ')" = "  bytes=100000- bytes=100000-" ]
}

@test "it is resumed by date where there is no ETag, and by size where there is neither" {
	elf "$(ztunnel_file)" amd64 300000
	ztunnel cut=100000,times=1,etag=no,modified
	succeeds "$tree/out/amd64/ztunnel-$version"
	[[ $(asked_with if_range | tail -n 1) == *" GMT" ]]
	rm -r "$tree/out"
	ztunnel cut=100000,times=1,etag=no
	succeeds "$tree/out/amd64/ztunnel-$version"
	cmp "$tree/out/amd64/ztunnel" "$(ztunnel_file)"
	[ "$(asked_with range | tail -n 1)" = "bytes=100000-" ]
	[ "$(asked_with if_range | tail -n 1)" = "" ]
}

@test "a server without ranges is asked from the start" {
	elf "$(ztunnel_file)" amd64 300000
	ztunnel cut=100000,times=1,ranges=no
	succeeds "$tree/out/amd64/ztunnel-$version"
	cmp "$tree/out/amd64/ztunnel" "$(ztunnel_file)"
}

@test "a file that changes meanwhile is not glued together" {
	elf "$(ztunnel_file)" amd64 300000
	ztunnel cut=100000,times=1,change
	succeeds "$tree/out/amd64/ztunnel-$version"
	[ "$(grep -c first "$tree/out/amd64/ztunnel")" -eq 0 ]
	rm -r "$tree/out"
	# Without an ETag, the size tells.
	elf "$(ztunnel_file)" amd64 300000
	ztunnel cut=100000,times=1,etag=no,shorter=500
	fails "not an ELF binary"
}

@test "a body that always ends early is an error, and leaves nothing" {
	elf "$(ztunnel_file)" amd64 300000
	ztunnel cut=100,ranges=no
	fails "$(base cut=100,ranges=no)/ztunnel-$version-amd64" "ended after 100 of 300000 bytes"
}

@test "a truncated body that says no size is found by its ELF header" {
	elf "$(ztunnel_file)" amd64 5000
	truncate -s 4000 "$(ztunnel_file)"
	ztunnel nolength
	fails "$(base nolength)/ztunnel-$version-amd64" "cut off: 4000 bytes, of at least 5000"
}

@test "a server that falls silent is left, and the transfer resumed" {
	elf "$(ztunnel_file)" amd64 300000
	ARTIFACT_STALL_SECONDS=1 ztunnel hang=100000,times=1
	succeeds "$tree/out/amd64/ztunnel-$version"
	[ "$(asked_with range | tail -n 1)" = "bytes=100000-" ]
	[[ $stderr == *"less than 1 kB/s for 1 seconds, after 100000 bytes"* ]]
}

@test "every request is bounded in time and size" {
	elf "$(ztunnel_file)" amd64
	ztunnel ok
	for option in --connect-timeout --max-time --speed-time --max-filesize; do
		grep -E -e "$option [0-9]+ " "$STATE/curl.argv"
	done
	grep -e '--proto =https' "$STATE/curl.argv"
}

@test "a file that is too large is refused, whether it says so or not" {
	elf "$(ztunnel_file)" amd64 300000
	ARTIFACT_MAX_BYTES=100000 ztunnel ok
	fails "$(base ok)/ztunnel-$version-amd64" "larger than 100000 bytes" ARTIFACT_MAX_BYTES
	ARTIFACT_MAX_BYTES=1000000 ztunnel endless
	fails "larger than 1000000 bytes"
	[ "$(asked)" -eq 2 ]
	ARTIFACT_MAX_BYTES=100000 ztunnel cut=90000
	fails "larger than 100000 bytes"
}

@test "a run that a signal ends leaves what it has, and the next goes on from there" {
	elf "$(ztunnel_file)" amd64 300000
	for signal in TERM INT HUP; do
		forget
		export ISTIO_ZTUNNEL_BASE_URL
		ISTIO_ZTUNNEL_BASE_URL=$(base "hang=100000,times=1,$signal")
		# The shell starts it with SIGINT ignored, and whoever runs the tests may have ignored SIGHUP;
		# a script cannot take that back.
		env --default-signal="$signal" "$tree/tools/download-ztunnel.sh" >"$STATE/one" 2>"$STATE/one.errors" 3>&- &
		script=$!
		chunk=$tree/out/amd64/.ztunnel-$version.part/chunk
		await_size 90000 "$chunk"
		kill "-$signal" "$script"
		code=0
		wait "$script" || code=$?
		[ "$code" -gt 128 ]
		had=$(stat -c %s "$chunk")
		[ ! -e "$tree/out/amd64/ztunnel-$version" ]
		grep "goes on from here" "$STATE/one.errors"
		ztunnel ok
		succeeds "$tree/out/amd64/ztunnel-$version"
		cmp "$tree/out/amd64/ztunnel" "$(ztunnel_file)"
		[ "$(asked_with range | tail -n 1)" = "bytes=$had-" ]
		[ "$(find "$tree/out" -name '.*' | wc -l)" -eq 0 ]
		rm -r "$tree/out"
	done
}

# await_size BYTES FILE returns when the file is that large. (curl writes whole blocks.)
await_size() {
	local tries
	for ((tries = 0; tries < 500; tries++)); do
		[ "$(stat -c %s "$2" 2>/dev/null || echo 0)" -lt "$1" ] || return 0
		/bin/sleep 0.02
	done
	return 1
}

@test "what another base has left half is not taken up" {
	elf "$(ztunnel_file)" amd64 300000
	part=$tree/out/amd64/.ztunnel-$version.part
	mkdir -p "$part"
	printf '%s\n' "https://elsewhere.example/ztunnel-$version-amd64" >"$part/source"
	head -c 1000 /dev/zero >"$part/body"
	printf 'total=300000\nvalidator=\n' >"$part/body.meta"
	ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-$version"
	cmp "$tree/out/amd64/ztunnel" "$(ztunnel_file)"
}

@test "what is left half and longer than the file is thrown away" {
	elf "$(ztunnel_file)" amd64 3000
	part=$tree/out/amd64/.ztunnel-$version.part
	mkdir -p "$part"
	printf '%s\n' "$(base ok)/ztunnel-$version-amd64" >"$part/source"
	head -c 4000 /dev/zero >"$part/body"
	printf 'total=5000\nvalidator=\n' >"$part/body.meta"
	ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-$version"
	cmp "$tree/out/amd64/ztunnel" "$(ztunnel_file)"
	[[ $stderr == *"less of the file than came before"* ]]
}

@test "an HTML page is no binary" {
	ztunnel html
	fails "$(base html)/ztunnel-$version-amd64" "an HTML page" "Sign in" ISTIO_ZTUNNEL_BASE_URL
	[[ $stderr != *$'\e'* ]]
}

@test "an empty file, and one that is something else" {
	: >"$(ztunnel_file)"
	ztunnel ok
	fails "not an ELF binary, but empty"
	printf '#!/bin/sh\n' >"$(ztunnel_file)"
	ztunnel ok
	fails "not an ELF binary" "#!/bin/sh"
	printf '\x7fELF' >"$(ztunnel_file)"
	ztunnel ok
	fails "$(base ok)/ztunnel-$version-amd64"
}

@test "a binary for another architecture is refused" {
	elf "$(ztunnel_file)" arm64
	ztunnel ok
	fails "$(base ok)/ztunnel-$version-amd64" "for arm64, not for amd64" TARGET_ARCH
}

@test "an error replaces nothing: neither the binary, nor its hash, nor the link" {
	elf "$(ztunnel_file)" amd64
	ztunnel ok
	before
	for how in status=404 status=500 html endless redirect=plain cut=10,ranges=no; do
		ARTIFACT_MAX_BYTES=10000 ZTUNNEL_VERSION=next ztunnel "$how"
		fails "$(base "$how")/ztunnel-next-amd64"
	done
	# Nor a damaged one of the same version.
	printf 'x' >>"$tree/out/amd64/ztunnel-$version"
	before
	ztunnel status=404
	fails 404
}
