# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# What tools/download-*.sh have in common: options, the cache under out/, and the checks
# that a file passes before it gets its name. To be sourced after common.sh by a script
# that fills the map "artifact" (name, title, pin, default_base, build, debug_advice) and
# defines file_name, check_downloaded and unpack.
#
# The cache is out/ARCH: NAME-VERSION[-debug] is the binary, the same with .sha256 what
# was computed when it came, and NAME a link to the one that was asked for last. A file
# gets its name by rename when every check has passed; until then it lies in a directory
# of its own that goes away with the script, unless a signal ended it: then the next run
# goes on where that one stopped.
#
# It refuses to guess: no hash is made up, and nothing is taken that is not an ELF of the
# right machine.

# shellcheck source=tools/download/auth.sh
source "${BASH_SOURCE[0]%/*}/auth.sh"
# shellcheck source=tools/download/transfer.sh
source "${BASH_SOURCE[0]%/*}/transfer.sh"

declare -A artifact
out=$(cd "${BASH_SOURCE[0]%/*}/../.." && pwd)/out
interrupted=

artifact_usage() {
	local name=${artifact[name]} title=${artifact[title]}
	cat <<-END
		usage: tools/download-$name.sh [--dry-run | --print-path | --help]

		Fetches $name into out/ARCH, unless it is there, and prints where it is.

		  --dry-run     say what would be fetched, from where, and with which kind of auth
		  --print-path  print where the binary is kept, fetched or not; fetch nothing
		  --help        show this

		from the environment:
		  ${title}_VERSION           commit to fetch; pinned: ${artifact[pin]} ($PINNED_FROM)
		  ${title}_SHA256            what the downloaded file must have, for that version and architecture
		  TARGET_ARCH               amd64 or arm64; this machine's unless given
		  DEBUG=1                   the debug build
		  ISTIO_${title}_BASE_URL    https://, s3:// or file:// directory
		                            (default ${artifact[default_base]})
		  ARTIFACT_AUTH             how to prove who you are to a private mirror, which is any https:// base but
		                            Istio's own: auto (gcloud; the default), none, gcloud, token-file=PATH.
		                            s3:// is presigned by aws
		  ARTIFACT_MAX_BYTES        refuse what is larger (default $DEFAULT_MAX_BYTES)
		  ARTIFACT_STALL_SECONDS    try again after so many seconds at less than 1 kB/s (default $DEFAULT_STALL_SECONDS)
		  CURL_CA_BUNDLE            certificates that curl trusts; https_proxy and NO_PROXY work too, ~/.curlrc is not read
	END
	[ "$name" != ztunnel ] || cat <<-END
		  BUILD_ZTUNNEL=1           build it with cargo instead, from the checkout in
		  ZTUNNEL_REPO=DIR          this directory
	END
}

# artifact_main OPTION...: the whole script, once "artifact" is filled.
artifact_main() {
	export LC_ALL=C # what programs say is looked at
	ulimit -c 0     # a core file would hold the token
	case $#:${1:-} in
		0: | 1:--dry-run | 1:--print-path) ;;
		1:--help | 1:-h)
			artifact_usage
			return
			;;
		*)
			# What was given is not shown: it may be a URL with a secret.
			say "error: this takes --dry-run, --print-path, --help or no argument; settings are read from the environment (tools/download-${artifact[name]}.sh --help)"
			exit 2
			;;
	esac
	artifact_config
	case ${1:-} in
		--dry-run) artifact_dry_run ;;
		--print-path) printf '%s\n' "${artifact[binary]}" ;;
		*) artifact_get ;;
	esac
}

# artifact_config reads the environment into the map, and dies of what makes no sense.
artifact_config() {
	local title=${artifact[title]} name=${artifact[name]} value
	value=${title}_VERSION
	artifact[version]=${!value:-${artifact[pin]}}
	[[ ${artifact[version]} =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] ||
		die "${title}_VERSION is not a version: letters, digits, dots, dashes"
	artifact[arch]=$(target_arch)
	artifact[flavour]=release
	[ -z "${DEBUG:-}" ] || [ "$DEBUG" = 0 ] || artifact[flavour]=debug

	value=ISTIO_${title}_BASE_URL
	parse_base "$value" "${!value:-${artifact[default_base]}}"
	artifact[file]=$(file_name "${artifact[version]}" "${artifact[arch]}" "${artifact[flavour]}")
	artifact[shown_url]=${artifact[base]}/${artifact[file]}
	artifact[auth]=$(auth_kind)

	value=${title}_SHA256
	artifact[sha256]=${!value:-}
	if [ -z "${artifact[sha256]}" ] && [ "${artifact[version]}" = "${artifact[pin]}" ] && [ "${artifact[flavour]}" = release ]; then
		value=${title}_PIN_SHA256_${artifact[arch]}
		artifact[sha256]=${!value}
	fi
	[[ ${artifact[sha256]} =~ ^([0-9a-f]{64})?$ ]] || die "${title}_SHA256 is not a SHA-256: 64 digits of 0-9a-f"

	artifact[dir]=$out/${artifact[arch]}
	artifact[binary]=${artifact[dir]}/$name-${artifact[version]}
	[ "${artifact[flavour]}" = release ] || artifact[binary]+=-debug
	artifact[kept]=${artifact[binary]}.sha256
	if building; then
		artifact[binary]=${artifact[dir]}/$name-built
		artifact[kept]=
	fi
	artifact[part]=${artifact[dir]}/.${artifact[binary]##*/}.part
}

building() {
	[ -n "${artifact[build]}" ] && [ "${artifact[build]}" != 0 ]
}

# target_arch prints amd64 or arm64.
target_arch() {
	local arch=${TARGET_ARCH:-$(uname -m)}
	case $arch in
		amd64 | x86_64) printf 'amd64\n' ;;
		arm64 | aarch64) printf 'arm64\n' ;;
		*) die "there are no builds for architecture $arch: set TARGET_ARCH to amd64 or arm64" ;;
	esac
}

artifact_dry_run() {
	local hash=${artifact[sha256]} cached=no
	if [ -z "$hash" ]; then
		hash=$(kept_hash downloaded)
		hash=${hash:-not known: it is computed, printed and kept}
	fi
	if ! building && cached_ok; then
		cached="yes: nothing would be fetched"
	fi
	printf '%-9s %s\n' artifact "${artifact[name]}, ${artifact[flavour]} build" \
		version "${artifact[version]}" arch "${artifact[arch]}"
	if building; then
		printf '%-9s %s\n' from "cargo build in ${ZTUNNEL_REPO:-ZTUNNEL_REPO, which is not set}" auth none
	else
		printf '%-9s %s\n' from "${artifact[shown_url]}" auth "$(auth_words)" sha256 "$hash" cached "$cached"
	fi
	printf '%-9s %s\n' to "${artifact[binary]}"
}

# artifact_get makes the artifact be there, and prints where.
artifact_get() {
	require_commands curl:curl flock:util-linux od:coreutils gzip:gzip tar:tar
	lock
	if ! building && cached_ok; then
		note "${artifact[name]} is there already: ${artifact[binary]}"
	else
		trap finish EXIT
		trap 'stop 129' HUP
		trap 'stop 130' INT
		trap 'stop 143' TERM
		if building; then build; else fetch; fi
	fi
	point_at "${artifact[binary]##*/}"
	printf '%s\n' "${artifact[binary]}"
}

# note says to a person at a terminal what a log need not hold.
note() {
	[ ! -t 2 ] || say "$*"
}

# lock keeps other runs for this architecture away until the script ends. The directory
# itself is what is locked: a lock file would stay behind. curl inherits the lock, so that
# one that outlives a killed script is waited for, and what it wrote is used.
lock() {
	mkdir -p "${artifact[dir]}" || die "cannot make ${artifact[dir]}: see above"
	exec 9<"${artifact[dir]}"
	flock --nonblock 9 || {
		say "waiting for another download into ${artifact[dir]}"
		flock 9
	}
}

finish() {
	[ -n "$interrupted" ] || rm -rf "${artifact[part]}"
}

# stop CODE ends the script for a signal; what has come so far is kept.
stop() {
	interrupted=yes
	if [ -n "$curl_pid" ] && kill "$curl_pid" 2>/dev/null; then
		cat <&8 >/dev/null # until it has ended, and writes no more
	fi
	if [ -d "${artifact[part]}" ]; then
		say "stopped; the next run goes on from here"
	fi
	exit "$1"
}

# kept_hash WHAT prints the hash that was kept of "downloaded" or "binary", if one was.
kept_hash() {
	[ -n "${artifact[kept]}" ] && [ -f "${artifact[kept]}" ] || return 0
	sed -n -E "s/^([0-9a-f]{64})  $1\$/\\1/p" "${artifact[kept]}" | head -n 1
}

# hash_of FILE
hash_of() {
	local sum
	sum=$(sha256sum <"$1")
	printf '%s\n' "${sum%% *}"
}

# cached_ok: whether the binary is there, as it was when it came, and what is asked for.
cached_ok() {
	local binary=${artifact[binary]} kept
	[ -f "$binary" ] && [ ! -L "$binary" ] || return 1
	kept=$(kept_hash binary)
	if [ -z "$kept" ] || [ "$kept" != "$(hash_of "$binary")" ]; then
		say "$binary is not what was fetched once: fetching it again"
		return 1
	fi
	kept=$(kept_hash downloaded)
	[ -z "${artifact[sha256]}" ] || [ "$kept" = "${artifact[sha256]}" ] ||
		die "$binary came from a file with SHA-256 $kept, not ${artifact[sha256]}. Remove it to fetch it again"
}

# fetch downloads, checks, and gives the binary its name.
fetch() {
	local part=${artifact[part]} want got
	open_part
	download
	check_downloaded "$part/body" "${artifact[shown_url]}"
	got=$(hash_of "$part/body")
	want=${artifact[sha256]:-$(kept_hash downloaded)}
	[ -z "$want" ] || [ "$got" = "$want" ] || die "$(wrong_hash "$got" "$want")"
	unpack "$part/body" "$part/binary"
	check_elf "$part/binary"
	printf '%s  %s\n' "$got" downloaded "$(hash_of "$part/binary")" binary >"$part/sha256"
	publish
	mv -T "$part/sha256" "${artifact[kept]}"
	[ -n "$want" ] || say "SHA-256 of ${artifact[file]}: $got (computed, and kept in ${artifact[kept]})"
}

# publish gives the binary its name.
publish() {
	chmod 0755 "${artifact[part]}/binary"
	mv -T "${artifact[part]}/binary" "${artifact[binary]}" || die "cannot make ${artifact[binary]}: see above"
}

wrong_hash() {
	if [ -n "${artifact[sha256]}" ]; then
		printf '%s: SHA-256 is %s, not the known %s. Do not use that mirror before you know why\n' "${artifact[shown_url]}" "$1" "$2"
	else
		printf '%s: SHA-256 is %s, but was %s when it was fetched before. Find out why; remove %s to accept the new file\n' \
			"${artifact[shown_url]}" "$1" "$2" "${artifact[kept]}"
	fi
}

# open_part makes the directory for what is not finished yet, or takes up the one that an
# interrupted run has left, if that was after the same file.
open_part() {
	local part=${artifact[part]} source=
	[ ! -f "$part/source" ] || [ -L "$part" ] || source=$(<"$part/source")
	[ "$source" = "${artifact[shown_url]}" ] || rm -rf "$part"
	[ -d "$part" ] || mkdir -m 0700 "$part" || die "cannot write to ${artifact[dir]}: see above"
	rm -rf "$part/binary" "$part/sha256" "$part/link"
	printf '%s\n' "${artifact[shown_url]}" >"$part/source"
	[ -f "$part/body" ] || : >"$part/body"
}

# point_at NAME makes out/ARCH/ztunnel (or envoy) a link to the file beside it.
point_at() {
	local link=${artifact[dir]}/${artifact[name]} fresh
	[ "$(readlink "$link" || true)" != "$1" ] || return 0
	fresh=${artifact[dir]}/.${artifact[name]}.link
	ln -sfn "$1" "$fresh"
	mv -fT "$fresh" "$link" || {
		rm -f "$fresh"
		die "cannot make $link point at $1: see above, and remove what is in its place"
	}
}

# build makes ztunnel from a checkout, where cargo finds what it built there before.
build() {
	local repo=${ZTUNNEL_REPO:-} target=() profile=(--release) made=release
	[ -n "$repo" ] || die "BUILD_ZTUNNEL is set, but not ZTUNNEL_REPO: set it to a checkout of https://github.com/istio/ztunnel"
	[ -f "$repo/Cargo.toml" ] || die "ZTUNNEL_REPO=$repo has no Cargo.toml: it is no checkout of ztunnel"
	command -v cargo >/dev/null || die "no cargo command found: install Rust (https://rustup.rs), or fetch ztunnel without BUILD_ZTUNNEL"
	if [ "${artifact[flavour]}" = debug ]; then
		profile=()
		made=debug
	fi
	if [ "${artifact[arch]}" != "$(TARGET_ARCH='' target_arch)" ]; then
		case ${artifact[arch]} in
			amd64) target=(--target x86_64-unknown-linux-gnu) ;;
			arm64) target=(--target aarch64-unknown-linux-gnu) ;;
		esac
		made=${target[1]}/$made
	fi
	repo=$(cd "$repo" && pwd)
	# In the checkout: its .cargo/config.toml has flags without which ztunnel does not build.
	(cd "$repo" && cargo build ${profile[@]+"${profile[@]}"} ${target[@]+"${target[@]}"} --target-dir "$repo/out/rust" >&2 9<&-) ||
		die "cargo build in $repo: see above"
	artifact[shown_url]=$repo/out/rust/$made/ztunnel
	[ -f "${artifact[shown_url]}" ] || die "cargo build in $repo left no ${artifact[shown_url]}"
	open_part
	cp "${artifact[shown_url]}" "${artifact[part]}/binary"
	check_elf "${artifact[part]}/binary"
	publish
}

# read_bytes FILE OFFSET COUNT prints bytes in hexadecimal.
read_bytes() {
	od -A n -t x1 -v -j "$2" -N "$3" "$1" 2>/dev/null | tr -d ' \n'
}

# read_number FILE OFFSET BYTES prints a little-endian number.
read_number() {
	local hex value=0 i
	hex=$(read_bytes "$1" "$2" "$3")
	for ((i = ${#hex} - 2; i >= 0; i -= 2)); do
		value=$((value << 8 | 16#${hex:i:2}))
	done
	printf '%d\n' "$value"
}

# check_elf FILE dies unless the file is a whole Linux program for the architecture.
check_elf() {
	local file=$1 url=${artifact[shown_url]} machine want size end
	size=$(stat -c %s "$file")
	[ "$(read_bytes "$file" 0 4)" = 7f454c46 ] ||
		die "$url: not an ELF binary, but $(looks_like "$file"). $(not_an_artifact)"
	case ${artifact[arch]} in
		amd64) want=3e ;;
		arm64) want=b7 ;;
	esac
	machine=$(printf '%x' "$(read_number "$file" 18 2)")
	# Two for 64 bits, one for little endian.
	[ "$machine:$(read_bytes "$file" 4 2)" = "$want:0201" ] ||
		die "$url: an ELF binary for $(machine_name "$machine"), not for ${artifact[arch]}. Check TARGET_ARCH, and what the mirror serves"
	# Linkers put the table of sections last: where it ends, or the file is cut off.
	end=$(($(read_number "$file" 40 8) + $(read_number "$file" 58 2) * $(read_number "$file" 60 2)))
	[ "$size" -ge 64 ] && [ "$end" -ge 0 ] && [ "$size" -ge "$end" ] ||
		die "$url: the binary is cut off: $size bytes, of at least $end. Try again; if it stays so, the mirror's copy is broken"
}

machine_name() {
	case $1 in
		3e) printf 'amd64\n' ;;
		b7) printf 'arm64\n' ;;
		*) printf 'machine 0x%s\n' "$1" ;;
	esac
}

# looks_like FILE says what a file that is no artifact may be.
looks_like() {
	local start
	start=$(head -c 512 "$1" | tr -c '[:print:]' ' ' | head -c 60)
	if [ ! -s "$1" ]; then
		printf 'empty\n'
	elif [[ ${start,,} =~ ^[[:space:]]*\<(!doctype|html|head) ]]; then
		printf 'an HTML page ("%s...")\n' "$start"
	else
		printf 'something that begins with "%s"\n' "$start"
	fi
}

not_an_artifact() {
	printf 'A login page, a proxy or another mirror may have answered: check ISTIO_%s_BASE_URL and ARTIFACT_AUTH\n' "${artifact[title]}"
}
