# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# Where an artifact is, who may have it, and the credential for it. To be sourced by
# artifact.sh.
#
# A credential lives in shell variables that are not exported, and leaves them only by a
# pipe to curl. What an URL has after its "?" is taken for a credential too.

# What can be in an URL, and neither ends a line nor a string of curl's configuration.
readonly URL_FORM='^[]!#-;=?-[^-~]+$'

# parse_base VARIABLE URL fills base and query of the map.
parse_base() {
	local name=$1 url=$2
	[[ $url =~ $URL_FORM && $url != *\#* ]] ||
		die "$name is not an URL: no spaces, quotes, backslashes, <, > or #"
	artifact[query]=
	if [[ $url == *\?* ]]; then
		artifact[query]=?${url#*\?}
		url=${url%%\?*}
	fi
	while [[ $url == */ && $url != *:// ]]; do url=${url%/}; done
	case $url in
		https://?* | s3://?* | file:///?*) ;;
		file://localhost/?*) url=file://${url#file://localhost} ;;
		http://*) die "$name=$url: plain http can be changed on its way. Use https://, s3:// or file://" ;;
		*) die "$name=$url: of no kind that is known. Use https://HOST/PATH, s3://BUCKET/PATH or file:///PATH" ;;
	esac
	[[ $url != *@* ]] ||
		die "$name has an @, as if a name and a password stood before its host, where they would be shown. Put a token into a file: ARTIFACT_AUTH=token-file=PATH"
	artifact[base]=$url
}

# public_base: whether the base is one that Istio itself serves to everybody.
public_base() {
	[ -z "${artifact[query]}" ] || return 1
	case ${artifact[base]} in
		*/../* | */..) return 1 ;;
		https://storage.googleapis.com/istio-build/ztunnel) ;;
		https://storage.googleapis.com/istio-build/proxy) ;;
		https://blob.istio.io/istio-build | https://blob.istio.io/istio-build/*) ;;
		*) return 1 ;;
	esac
}

# auth_kind prints how this one artifact is asked for: file, presigned, public, none,
# gcloud or token-file=PATH. A public base gets no token whatever ARTIFACT_AUTH says: it
# needs none, and the token of a private mirror is nothing for others.
auth_kind() {
	local wanted=${ARTIFACT_AUTH:-auto}
	case $wanted in
		auto | none | gcloud | token-file=?*) ;;
		*) die "ARTIFACT_AUTH is none of auto, none, gcloud, token-file=PATH" ;;
	esac
	case ${artifact[base]} in
		file://*) printf 'file\n' ;;
		s3://*) printf 'presigned\n' ;;
		*)
			if public_base; then
				printf 'public\n'
			elif [ "$wanted" = auto ]; then
				printf 'gcloud\n'
			else
				printf '%s\n' "$wanted"
			fi
			;;
	esac
}

# auth_words says the same to a person.
auth_words() {
	case ${artifact[auth]} in
		file) printf 'none: a local file\n' ;;
		public) printf 'none: a public mirror\n' ;;
		none) printf 'none: ARTIFACT_AUTH=none\n' ;;
		presigned) printf 'URL presigned by aws\n' ;;
		gcloud) printf 'token of gcloud auth print-access-token\n' ;;
		token-file=*) printf 'token in the file %s\n' "${artifact[auth]#token-file=}" ;;
	esac
}

# get_token sets the variable of that name in its caller, to nothing where none is used.
get_token() {
	bearer=
	case ${artifact[auth]} in
		gcloud) gcloud_token ;;
		token-file=*) file_token "${artifact[auth]#token-file=}" ;;
	esac
}

# A warning of gcloud's, such as of an update, has a blank or is shorter than this.
readonly TOKEN_FORM='^[A-Za-z0-9._~+/-]{20,}=*$'

gcloud_token() {
	command -v gcloud >/dev/null ||
		die "${artifact[shown_url]}: this mirror is taken to be private, and there is no gcloud command to get a token from. Install it, or set ARTIFACT_AUTH=none or ARTIFACT_AUTH=token-file=PATH"
	local answer line
	# What it says when it fails may quote a credential: it is not repeated.
	answer=$(CLOUDSDK_CORE_DISABLE_PROMPTS=1 timeout --foreground -k 5 60 gcloud auth print-access-token </dev/null 2>/dev/null 9<&-) ||
		die "${artifact[shown_url]}: gcloud auth print-access-token failed (exit code $?): nobody is logged in, or the login has expired. Run gcloud auth login, or set ARTIFACT_AUTH=none if the mirror is public"
	# No here-document: older shells write those to a file.
	while [ -n "$answer" ]; do
		line=${answer%%$'\n'*}
		line=${line%$'\r'}
		[[ ! $line =~ $TOKEN_FORM ]] || bearer=$line
		case $answer in
			*$'\n'*) answer=${answer#*$'\n'} ;;
			*) answer= ;;
		esac
	done
	[ -n "$bearer" ] ||
		die "${artifact[shown_url]}: gcloud auth print-access-token printed nothing that could be a token. Run it by hand, and gcloud auth login if it complains"
}

file_token() {
	[ -f "$1" ] && [ -r "$1" ] || die "ARTIFACT_AUTH=token-file=$1: no file that can be read"
	bearer=$(tr -d '\0' <"$1")
	bearer=${bearer%$'\r'}
	[[ $bearer =~ ^[A-Za-z0-9._~+/-]+=*$ ]] ||
		die "ARTIFACT_AUTH=token-file=$1: the file holds not just one token, in one line. Write the bare token into it, without \"Bearer\""
}

# presign sets the variable "url" of its caller to what aws makes of the s3:// one.
presign() {
	command -v aws >/dev/null ||
		die "${artifact[shown_url]}: there is no aws command to presign it. Install the AWS CLI, or use an https:// base"
	url=$(timeout --foreground -k 5 60 aws s3 presign "${artifact[shown_url]}" --expires-in 3600 </dev/null 2>/dev/null 9<&-) ||
		die "${artifact[shown_url]}: aws s3 presign failed (exit code $?). Log in (aws sso login, or AWS_PROFILE), and try the command by hand"
	[[ $url == https://?* && $url =~ $URL_FORM ]] ||
		die "${artifact[shown_url]}: aws s3 presign printed no https:// URL. Try the command by hand"
}
