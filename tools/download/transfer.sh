# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# Gets a file over HTTPS, with curl, as from a server that may be slow, broken or hostile.
# To be sourced by artifact.sh.
#
# curl follows no redirects, retries nothing and resumes nothing here: only so is it
# known which host sees the token, and which bytes belong together. Everything that is
# secret reaches it as configuration on standard input. What a run has got lies in
# artifact[part]:
#
#	source        the URL, without its query
#	body          what has come so far
#	body.meta     of which file that is: its size and its validator (ETag or date)
#	chunk         what the request that is under way has brought
#	chunk.meta    what its answer said: status, first byte, size and validator of the file
#
# chunk becomes part of body in absorb, also in a later run that finds one left behind.

readonly DEFAULT_MAX_BYTES=$((2 << 30))
readonly DEFAULT_STALL_SECONDS=30
readonly MAX_ATTEMPTS=6
readonly MAX_HOPS=5
readonly MAX_WAIT=120        # seconds that a server may ask for
readonly MAX_TRANSFER=3600   # seconds for one request

# What is taken of a server's header. A weak ETag does not say that bytes are the same.
readonly STRONG_ETAG='^"[]!#-[^-~]*"$'
# A date as of RFC 9110, 5.6.7. Of anything else date(1) makes a time too: of a letter, or "tomorrow".
readonly DATE_FORM='^[A-Z][a-z]{2}, [0-9]{2} [A-Z][a-z]{2} [0-9]{4} [0-9]{2}:[0-9]{2}:[0-9]{2} GMT$'
readonly RANGE_FORM='^bytes ([0-9]{1,15})-[0-9]{1,15}/([0-9]{1,15}|\*)$'

curl_pid=

# download fills body, or dies.
download() {
	local url=${artifact[shown_url]}${artifact[query]} bearer= attempt
	# A variable that the environment has by chance would go on to curl.
	export -n url bearer
	# What the answer to one request was; request_once sets them.
	local outcome cause pause hops
	max_bytes=${ARTIFACT_MAX_BYTES:-$DEFAULT_MAX_BYTES}
	stall=${ARTIFACT_STALL_SECONDS:-$DEFAULT_STALL_SECONDS}
	[[ $max_bytes =~ ^[1-9][0-9]{0,14}$ ]] || die "ARTIFACT_MAX_BYTES is not a number of bytes"
	[[ $stall =~ ^[1-9][0-9]{0,5}$ ]] || die "ARTIFACT_STALL_SECONDS is not a number of seconds"
	case ${artifact[auth]} in
		file)
			copy_file "${url#file://}"
			return
			;;
		presigned) presign ;;
	esac
	get_token
	absorb
	! complete || return 0
	for ((attempt = 1; ; attempt++)); do
		fetch_once
		case $outcome in
			done) return 0 ;;
			failed) die "${artifact[shown_url]}: $cause" ;;
		esac
		[ "$attempt" -lt "$MAX_ATTEMPTS" ] || die "${artifact[shown_url]}: $cause. Given up after $attempt attempts: try again later"
		back_off "$attempt"
	done
}

# complete: whether body is known to be whole.
complete() {
	local total
	total=$(meta body total)
	[ -n "$total" ] && [ "$total" = "$(stat -c %s "${artifact[part]}/body")" ]
}

# back_off ATTEMPT waits before the next one: 1, 2, 4... seconds and up to one more, so
# that many who failed together do not return together; or what the server asked for.
back_off() {
	local seconds=$((1 << ($1 - 1)))
	[ "$seconds" -ge "$pause" ] || seconds=$pause
	[ "$seconds" -le "$MAX_WAIT" ] ||
		die "${artifact[shown_url]}: $cause, and the server asks to come back in $pause seconds. Try again then"
	say "${artifact[shown_url]}: $cause; trying again in $seconds s"
	# In the background: a signal is not to wait for it.
	sleep "$seconds.$((RANDOM % 10))" 9<&- &
	wait "$!"
}

# copy_file PATH is the download of a file:// URL.
copy_file() {
	local size
	[ -f "$1" ] || die "${artifact[shown_url]}: there is no such file. Check ISTIO_${artifact[title]}_BASE_URL, ${artifact[title]}_VERSION and TARGET_ARCH"
	size=$(stat -L -c %s "$1")
	[ "$size" -le "$max_bytes" ] || die "${artifact[shown_url]}: $(too_large)"
	cp "$1" "${artifact[part]}/body" || die "${artifact[shown_url]}: cannot be copied: see above"
}

too_large() {
	printf 'larger than %s bytes. Ask who runs the mirror what it serves there; ARTIFACT_MAX_BYTES allows more\n' "$max_bytes"
}

# fetch_once asks for what is missing, from hop to hop, and sets outcome (done, again,
# failed), cause and pause.
fetch_once() {
	local here=$url redirect status error code token=$bearer
	export -n here redirect token
	outcome='' cause='' pause=0
	for ((hops = 0; hops <= MAX_HOPS; hops++)); do
		request "$here"
		case $status in
			301 | 302 | 303 | 307 | 308)
				[ "$code" -eq 0 ] && [ -n "$redirect" ] || break
				[[ $redirect == https://?* && $redirect =~ $URL_FORM ]] || {
					outcome=failed cause="redirected to what is no https:// URL, which is not followed. Check $(base_variable)"
					return
				}
				# Once away, always away: a host further on could send it back.
				[ "$(origin "$redirect")" = "$(origin "$url")" ] || token=
				here=$redirect
				;;
			*) break ;;
		esac
	done
	[ "$hops" -le "$MAX_HOPS" ] || {
		outcome=failed cause="redirected more than $MAX_HOPS times. Check $(base_variable)"
		return
	}
	judge
	[ "$outcome" = done ] || [ "$hops" -eq 0 ] || cause="redirected to $(origin "$here"), $cause"
}

base_variable() {
	printf 'ISTIO_%s_BASE_URL\n' "${artifact[title]}"
}

# origin URL prints scheme, host and port.
origin() {
	local rest=${1#https://} host
	host=${rest%%[/?#]*}
	host=${host,,}
	host=${host%:443}
	printf 'https://%s\n' "${host##*@}"
}

# request URL makes one request, with the token where "token" holds one, and sets status,
# code (curl's exit code), redirect and error. The header is read here as it comes.
request() {
	local part=${artifact[part]} mark=mark-$RANDOM$RANDOM line have validator offset='' kind=--silent
	rm -f "$part/chunk" "$part/chunk.meta"
	validator=$(meta body validator)
	# What nobody can say belongs together is not put together.
	[ -n "$validator$(meta body total)" ] || start_anew
	have=$(stat -c %s "$part/body")
	[ "$have" -eq 0 ] || offset=$have
	[ ! -t 2 ] || kind=--progress-bar
	status='' code='' redirect='' error=''
	exec 8< <(
		set +e # curl's exit code is to be told
		curl_config "$1" | (
			printf '%s\n' "$BASHPID"
			# Whatever the server says of the size: no more than this is written. In units of
			# 1024 bytes, and a bit above, so that curl is the first to see it.
			ulimit -f $((max_bytes / 1024 + 64))
			exec curl -q "$kind" --config - --proto =https --globoff --connect-timeout 20 \
				--max-time "$MAX_TRANSFER" --speed-limit 1024 --speed-time "$stall" --max-filesize "$max_bytes" \
				--suppress-connect-headers --dump-header - --output "$part/chunk" \
				--write-out "$mark redirect %{redirect_url}\n$mark error %{errormsg}\n" 8<&-
		)
		printf '%s exit %d\n' "$mark" "${PIPESTATUS[1]}"
	)
	IFS= read -r -u 8 curl_pid || true
	read_answer
	exec 8<&-
	curl_pid=
}

# curl_config URL prints what curl is told by standard input.
curl_config() {
	printf 'url = "%s"\n' "$1"
	# Not by a header of our own: curl sends that one to proxies and other hosts more easily.
	[ -z "$token" ] || printf 'oauth2-bearer = "%s"\n' "$token"
	if [ -n "$offset" ]; then
		printf 'header = "Range: bytes=%s-"\n' "$offset"
		validator=${validator//\"/\\\"}
		[ -z "$validator" ] || printf 'header = "If-Range: %s"\n' "$validator"
	fi
}

# read_answer reads the header of the last of the answers, and what curl says at its end.
read_answer() {
	local line first=0 total='' etag='' modified='' length='' range=''
	while IFS= read -r -u 8 line; do
		line=${line%$'\r'}
		case $line in
			"$mark redirect "*) redirect=${line#"$mark redirect "} ;;
			"$mark error "*) error=$(plain "${line#"$mark error "}") ;;
			"$mark exit "*) code=${line#"$mark exit "} ;;
			HTTP/*)
				status=${line#* }
				status=${status%% *}
				total='' etag='' modified='' length='' range='' pause=0
				;;
			'') [ -z "$status" ] || write_meta ;;
			*:*) read_header "${line%%:*}" "${line#*:}" ;;
		esac
	done
	[[ $status =~ ^[0-9]{3}$ ]] || status=000
	code=${code:-1}
}

# read_header NAME VALUE
read_header() {
	local value=$2
	value=${value#"${value%%[![:space:]]*}"}
	case ${1,,} in
		etag) [[ ! $value =~ $STRONG_ETAG ]] || etag=$value ;;
		last-modified) [[ ! $value =~ $DATE_FORM ]] || modified=$value ;;
		content-length) [[ ! $value =~ ^[0-9]{1,15}$ ]] || length=$value ;;
		content-range) range=$value ;;
		retry-after) pause=$(retry_after "$value") ;;
	esac
}

# retry_after VALUE prints seconds.
retry_after() {
	local when
	if [[ $1 =~ ^[0-9]{1,9}$ ]]; then
		printf '%d\n' "$((10#$1))"
	elif [[ $1 =~ $DATE_FORM ]] && when=$(date -d "$1" +%s 2>/dev/null); then
		when=$((when - $(date +%s)))
		printf '%d\n' "$((when > 0 ? when : 0))"
	else
		printf '0\n'
	fi
}

# write_meta notes, before the body comes, what it is.
write_meta() {
	case $status in
		200) total=$length ;;
		206)
			[[ $range =~ $RANGE_FORM ]] || return 0
			first=$((10#${BASH_REMATCH[1]})) total=${BASH_REMATCH[2]#\*}
			;;
		*) return 0 ;;
	esac
	printf '%s=%s\n' status "$status" first "$first" total "$total" validator "${etag:-$modified}" >"${artifact[part]}/chunk.meta"
}

# meta FILE KEY prints what FILE.meta says.
meta() {
	[ -f "${artifact[part]}/$1.meta" ] || return 0
	sed -n "s/^$2=//p" "${artifact[part]}/$1.meta" | head -n 1
}

# absorb adds chunk to body if it is what follows there, in the same file; a whole new
# file takes the place of body.
absorb() {
	local part=${artifact[part]} total
	if [ -f "$part/chunk" ] && [ -f "$part/chunk.meta" ]; then
		case $(meta chunk status) in
			200)
				mv -T "$part/chunk" "$part/body"
				mv -T "$part/chunk.meta" "$part/body.meta"
				;;
			206)
				[ -f "$part/body.meta" ] || cp "$part/chunk.meta" "$part/body.meta"
				total=$(meta body total)
				if [ -n "$total" ] && [ "$(meta chunk total)" != "$total" ]; then
					start_anew # another file by now
				elif [ "$(meta chunk first)" = "$(stat -c %s "$part/body")" ]; then
					cat "$part/chunk" >>"$part/body"
				fi # else an interrupted absorb has added it, or some of it
				;;
		esac
	fi
	rm -f "$part/chunk" "$part/chunk.meta"
}

start_anew() {
	: >"${artifact[part]}/body"
	rm -f "${artifact[part]}/body.meta"
}

# plain TEXT prints what may be shown of what curl or a server says: no control
# characters, no query, no token.
plain() {
	local text
	text=$(printf '%s' "$1" | tr -c '[:print:]' ' ' | sed -E 's/\?[^ ]*/?.../g' | head -c 300)
	[ -z "$bearer" ] || text=${text//"$bearer"/...}
	printf '%s\n' "$text"
}

# judge sets outcome and cause from what the last request came to.
judge() {
	local size total
	case $status in
		200 | 206 | 000) ;;
		*)
			judge_status
			return
			;;
	esac
	# An empty body may leave no file.
	[ "$code" -ne 0 ] || [ -f "${artifact[part]}/chunk" ] || : >"${artifact[part]}/chunk"
	absorb
	size=$(stat -c %s "${artifact[part]}/body")
	total=$(meta body total)
	if [ "$size" -gt "$max_bytes" ] || [ "${total:-0}" -gt "$max_bytes" ]; then
		outcome=failed cause=$(too_large)
	elif [ "$code" -ne 0 ]; then
		judge_code
	elif [ "$status" = 000 ]; then
		outcome=failed cause="no HTTP answer. Check $(base_variable)"
	elif [ -n "$total" ] && [ "$size" -ne "$total" ]; then
		outcome=again cause="the body ended after $size of $total bytes"
		[ "$size" -lt "$total" ] || start_anew
	elif [ "$status" = 206 ] && [ -z "$total" ]; then
		outcome=again cause="the server does not say how large the file is"
		start_anew
	else
		outcome=done
	fi
}

judge_status() {
	outcome=failed
	cause="the server answers $status"
	case $status in
		401 | 403)
			cause+=$(
				case $token:${artifact[auth]} in
					:none) printf ': it wants to know who asks. Set ARTIFACT_AUTH=gcloud or ARTIFACT_AUTH=token-file=PATH\n' ;;
					:public) printf ': it refuses, as some servers do for what they do not have. Check %s_VERSION and TARGET_ARCH\n' "${artifact[title]}" ;;
					:presigned) printf ': it refuses the presigned URL. Check that your AWS account may read that object, and the clock\n' ;;
					:*) printf '. The token is not sent to another host: check what the mirror redirects to\n' ;;
					*) printf ': it refuses the token. Check that the account (gcloud auth list) or the token file may read there; some servers answer so for what they do not have\n' ;;
				esac
			)
			;;
		404 | 410) cause+=$(
			printf ': there is no such file. Check %s_VERSION (%s), TARGET_ARCH (%s) and %s\n' \
				"${artifact[title]}" "${artifact[version]}" "${artifact[arch]}" "$(base_variable)"
			[ "${artifact[flavour]}" = release ] || printf '; %s\n' "${artifact[debug_advice]}"
		) ;;
		416)
			outcome=again cause="the server has less of the file than came before"
			start_anew
			;;
		429) outcome=again cause+=": too many requests" ;;
		5??) outcome=again ;;
		*) cause+=". Check $(base_variable)" ;;
	esac
}

# judge_code is for a request that got no whole answer.
judge_code() {
	outcome=failed
	case $code in
		5 | 6 | 7 | 16 | 18 | 28 | 35 | 52 | 55 | 56 | 92)
			outcome=again
			cause=${error:-curl ends with code $code}
			[ "$code" -ne 18 ] || [ -z "$total" ] || cause="the body ended after $size of $total bytes"
			[ "$code" -ne 28 ] || [ "$size" -eq 0 ] || cause="less than 1 kB/s for $stall seconds, after $size bytes"
			;;
		63 | 153) cause=$(too_large) ;;
		23)
			cause="cannot be written to ${artifact[dir]}: ${error:-see above}. Is the disk full?"
			[ "$(stat -c %s "${artifact[part]}/body")" -lt "$max_bytes" ] || cause=$(too_large)
			;;
		51 | 58 | 60 | 77 | 83 | 90 | 91)
			cause="its certificate cannot be trusted: ${error:-curl ends with code $code}. Set CURL_CA_BUNDLE to the certificates of who runs the mirror"
			;;
		*) cause="${error:-curl ends with code $code}. Check $(base_variable)" ;;
	esac
}
