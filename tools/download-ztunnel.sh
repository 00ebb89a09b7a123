#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Fetches the ztunnel that development and end-to-end tests run against, or builds it
# from a checkout. --help says what it reads from the environment.
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

describe_ztunnel() {
	artifact[name]=ztunnel
	artifact[title]=ZTUNNEL
	artifact[pin]=$ZTUNNEL_PIN
	artifact[default_base]=https://storage.googleapis.com/istio-build/ztunnel
	artifact[build]=${BUILD_ZTUNNEL:-}
	artifact[debug_advice]="Istio publishes no debug builds of ztunnel: BUILD_ZTUNNEL=1 ZTUNNEL_REPO=DIR DEBUG=1 makes one"
}

# file_name VERSION ARCH FLAVOUR prints how the mirror names it.
file_name() {
	case $3 in
		release) printf 'ztunnel-%s-%s\n' "$1" "$2" ;;
		debug) printf 'ztunnel-debug-%s-%s\n' "$1" "$2" ;;
	esac
}

# unpack DOWNLOADED BINARY: the file is the binary.
unpack() {
	mv -T "$1" "$2"
}

# check_downloaded FILE URL: nothing beyond what is checked of every binary.
check_downloaded() {
	:
}

describe_ztunnel
artifact_main "$@"
