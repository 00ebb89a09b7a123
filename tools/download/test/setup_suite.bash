# SPDX-License-Identifier: Apache-2.0
#
# One mirror for all tests. It is told to end when they have.

setup_suite() {
	local root
	root=$(cd "$BATS_TEST_DIRNAME/../../.." && pwd)
	# shellcheck source=common.sh
	source "$root/common.sh"
	require_go
	MIRROR_DIR=$BATS_SUITE_TMPDIR/mirror
	REAL_CURL=$(command -v curl)
	export MIRROR_DIR REAL_CURL MIRROR_PORTS
	mkdir -p "$MIRROR_DIR/files"
	mkfifo "$MIRROR_DIR/ready"
	go -C "$root" build -o "$MIRROR_DIR/mirror" ./tools/download/mirror
	"$MIRROR_DIR/mirror" "$MIRROR_DIR" >"$MIRROR_DIR/ready" 2>"$MIRROR_DIR/errors" 3>&- &
	printf '%d\n' "$!" >"$MIRROR_DIR/pid"
	read -r MIRROR_PORTS <"$MIRROR_DIR/ready"
}

teardown_suite() {
	kill "$(<"$MIRROR_DIR/pid")"
	cat "$MIRROR_DIR/errors" >&2
}
