# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# What the tests share. Each has a checkout of its own, with the scripts as they are, and a
# directory of files on the mirror; gcloud, aws, cargo, sleep and curl are stand-ins that
# note how they are called. tools/download/mirror says what the first segment of an URL's
# path does.
# shellcheck disable=SC2154 # bats sets output, stderr, status

bats_require_minimum_version 1.5.0

setup() {
	local here=$BATS_TEST_DIRNAME
	id=t$BATS_SUITE_TEST_NUMBER
	tree=$BATS_TEST_TMPDIR/tree
	files=$MIRROR_DIR/files/$id
	token=ya29.a0-the_token-that.nobody/may+see==
	version=0123456789abcdef
	# shellcheck disable=SC2034 # some tests use the second; the third is for redirects alone
	read -r named_port other_port _ <<<"$MIRROR_PORTS"
	export STATE=$BATS_TEST_TMPDIR/state
	mkdir -p "$tree/tools" "$STATE" "$files"
	cp "$here/../../../common.sh" "$tree/"
	cp -r "$here/.." "$tree/tools/download"
	cp "$here"/../../download-*.sh "$tree/tools/"
	printf '%s\n' "$token" | tee "$files/token" >"$STATE/token"
	printf 'fine\n' >"$STATE/gcloud"
	touch "$STATE"/{curl,gcloud,aws,cargo,sleep}.argv "$STATE/curl.environment"

	export PATH=$here/standins:$PATH
	export CURL_CA_BUNDLE=$MIRROR_DIR/ca.pem ZTUNNEL_VERSION=$version ENVOY_VERSION=$version TARGET_ARCH=amd64
	export ARTIFACT_AUTH=none NO_PROXY='*' no_proxy='*'
	unset SSL_CERT_FILE SSL_CERT_DIR https_proxy HTTPS_PROXY all_proxy ALL_PROXY DEBUG BUILD_ZTUNNEL ZTUNNEL_REPO
	unset ZTUNNEL_SHA256 ENVOY_SHA256 ISTIO_ZTUNNEL_BASE_URL ISTIO_ENVOY_BASE_URL ARTIFACT_MAX_BYTES ARTIFACT_STALL_SECONDS
}

# base HOW prints a base URL on the mirror.
base() {
	printf 'https://localhost:%s/%s/%s\n' "$named_port" "$1" "$id"
}

# ztunnel HOW [OPTION...] runs the script against the mirror.
ztunnel() {
	local how=$1
	shift
	ISTIO_ZTUNNEL_BASE_URL=${ISTIO_ZTUNNEL_BASE_URL-$(base "$how")} run --separate-stderr "$tree/tools/download-ztunnel.sh" "$@"
}

envoy() {
	local how=$1
	shift
	ISTIO_ENVOY_BASE_URL=${ISTIO_ENVOY_BASE_URL-$(base "$how")} run --separate-stderr "$tree/tools/download-envoy.sh" "$@"
}

# elf FILE ARCH [SIZE [FILL]] makes an ELF header for that architecture, with a section
# table that ends where the file does.
elf() {
	local size=${3:-4096} fill=${4:-first } machine
	case $2 in
		amd64) machine='\x3e' ;;
		arm64) machine='\xb7' ;;
	esac
	{
		printf '\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0%b\0\x01\0\0\0' "$machine"
		printf '\0%.0s' {1..16} # entry point, program headers
		little_endian $((size - 64)) 8
		printf '\0%.0s' {1..10} # flags, sizes
		little_endian 64 2
		little_endian 1 2
		printf '\0\0'
		yes "$fill" | tr -d '\n' | head -c $((size - 64))
	} >"$1"
}

little_endian() {
	local value=$1 i
	for ((i = 0; i < $2; i++)); do
		# shellcheck disable=SC2059 # the format is made of one byte
		printf "\\x$(printf '%02x' $((value & 255)))"
		value=$((value >> 8))
	done
}

# ztunnel_file prints where the mirror has ztunnel for amd64.
ztunnel_file() {
	printf '%s/ztunnel-%s-amd64\n' "$files" "$version"
}

# envoy_archive FILE BINARY [NAME] packs a binary as Istio does.
envoy_archive() {
	local name=${3:-usr/local/bin/envoy} dir=$BATS_TEST_TMPDIR/pack
	rm -rf "$dir"
	mkdir -p "$dir/${name%/*}"
	cp "$2" "$dir/$name"
	tar -czf "$1" -C "$dir" "$name"
}

# requests prints what the mirror noted of this test's since forget.
requests() {
	tail -n "+$((${forgotten:-0} + 1))" "$MIRROR_DIR/log" | grep -F "/$id/" || true
}

# forget: what was asked so far does not count.
forget() {
	forgotten=$(wc -l <"$MIRROR_DIR/log")
}

# asked prints how often this test's files were asked for, of all servers or of one.
asked() {
	requests | grep -c -F "\"server\":\"${1:-}" || true
}

# asked_with KEY prints what the requests had there, one a line.
asked_with() {
	requests | sed -E "s/.*\"$1\":\"(([^\"\\\\]|\\\\.)*)\".*/\\1/"
}

# succeeds: the script's last run did, and printed FILE, which is there.
succeeds() {
	[ "$status" -eq 0 ] || {
		printf 'exit code %d: %s\n' "$status" "$stderr"
		return 1
	}
	[ "$output" = "$1" ] || {
		printf 'printed "%s", not "%s"\n' "$output" "$1"
		return 1
	}
	[ -x "$1" ]
}

# fails WORDS...: the last run failed, says all of them, and left nothing.
fails() {
	local words
	[ "$status" -eq 1 ] || {
		printf 'exit code %d, not 1: %s\n' "$status" "$output"
		return 1
	}
	for words in "$@"; do
		[[ $stderr == *"$words"* ]] || {
			printf 'it does not say "%s", but: %s\n' "$words" "$stderr"
			return 1
		}
	done
	[ -z "$output" ] || return 1
	left_nothing
	no_secret
}

# left_nothing: no file but what "before" noted is below out/, unchanged.
left_nothing() {
	local now
	now=$(listing)
	[ "$now" = "$(cat "$STATE/before" 2>/dev/null)" ] || {
		printf 'left behind or changed: %s\n' "$now"
		return 1
	}
}

# before notes what is below out/.
before() {
	listing >"$STATE/before"
}

listing() {
	[ -d "$tree/out" ] || return 0
	(cd "$tree/out" && find . -type f -exec sha256sum {} + -o -type l -printf '%l  %p\n' | sort -k 2)
	# A directory that is empty and not hidden is no file.
	find "$tree/out" -mindepth 1 -name '.*'
}

# no_secret: neither the token nor a presigned URL's query is in what the script said, in
# what anybody could see of its processes, or in a file that is left.
no_secret() {
	local secret
	for secret in "$token" "${token:0:20}" presigned-secret; do
		[[ $output$stderr != *"$secret"* ]] || {
			printf 'a secret is in the output: %s\n' "$output$stderr"
			return 1
		}
		! grep -l -F -e "$secret" "$STATE"/*.argv || return 1
		if [ -d "$tree/out" ]; then
			! grep -r -l -F -e "$secret" "$tree/out" || return 1
		fi
	done
	# A base URL with a query is the caller's own, in the environment that it was given in.
	! grep -l -F -e "$token" "$STATE"/*.environment || return 1
}
