#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Fetches Istio's Envoy, for tests of SDS and of waypoints. --help says what it reads
# from the environment.
#
# First of all, and before anything could be traced: a token is about to be handled, and
# whoever runs this with bash -x, or inherits xtrace or allexport, must not see it.
set +x +v +a
unset BASH_ENV CDPATH
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=common.sh
source "$here/../common.sh"
# shellcheck source=tools/download/artifact.sh
source "$here/download/artifact.sh"

# The archive may unpack to this much; a debug build comes near a fourth of it.
readonly MAX_UNPACKED=$((8 << 30))
readonly MEMBER=usr/local/bin/envoy

describe_envoy() {
	artifact[name]=envoy
	artifact[title]=ENVOY
	artifact[pin]=$ENVOY_PIN
	artifact[default_base]=https://storage.googleapis.com/istio-build/proxy
	artifact[build]=
	artifact[debug_advice]="not every version has a debug build: try without DEBUG=1"
}

# file_name VERSION ARCH FLAVOUR prints how the mirror names it.
file_name() {
	local suffix=
	[ "$2" = amd64 ] || suffix=-$2
	case $3 in
		release) printf 'envoy-alpha-%s%s.tar.gz\n' "$1" "$suffix" ;;
		debug) printf 'envoy-debug-%s%s.tar.gz\n' "$1" "$suffix" ;;
	esac
}

# check_downloaded FILE URL dies unless the file is a whole gzip stream of a bounded size.
check_downloaded() {
	[ "$(read_bytes "$1" 0 2)" = 1f8b ] ||
		die "$2: not a gzip archive, but $(looks_like "$1"). $(not_an_artifact)"
	local size codes
	size=$(
		gzip -dc "$1" 2>/dev/null | head -c $((MAX_UNPACKED + 1)) | wc -c
		codes=("${PIPESTATUS[@]}")
		[ "${codes[0]}" -eq 0 ] || printf 'broken\n'
	) || true
	[ "${size%%$'\n'*}" -le "$MAX_UNPACKED" ] ||
		die "$2: unpacks to more than $MAX_UNPACKED bytes. Ask who runs the mirror what it serves there"
	[[ $size != *broken ]] ||
		die "$2: the gzip archive is damaged or truncated. Try again; if it stays so, the mirror's copy is broken"
}

# unpack ARCHIVE BINARY writes the one member that is wanted. It goes through a pipe:
# no name, link or mode of the archive ever reaches the file system.
unpack() {
	local member
	for member in "$MEMBER" "./$MEMBER"; do
		gzip -dc "$1" 2>/dev/null | tar -xOf - --occurrence=1 -- "$member" >"$2" 2>/dev/null || true
		[ ! -s "$2" ] || return 0
	done
	die "${artifact[shown_url]}: the archive holds no file $MEMBER. Check ENVOY_VERSION and ISTIO_ENVOY_BASE_URL"
}

describe_envoy
artifact_main "$@"
