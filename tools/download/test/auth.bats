#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
#
# Who is asked with which credential, and that nobody else sees it (case 25).
# shellcheck disable=SC2154,SC2030,SC2031 # bats sets output, stderr, status; a test's exports end with it

load helper

@test "a private base gets gcloud's token, and nothing shows it" {
	elf "$(ztunnel_file)" amd64
	unset ARTIFACT_AUTH
	ztunnel private
	succeeds "$tree/out/amd64/ztunnel-$version"
	[ "$(asked_with authorization)" = "Bearer $token" ]
	no_secret
	# It is curl's standard input that had it.
	grep -F -e "$token" "$STATE"/private.*
}

@test "the token in gcloud's output is found among warnings" {
	elf "$(ztunnel_file)" amd64
	printf 'warning\n' >"$STATE/gcloud"
	ARTIFACT_AUTH=gcloud ztunnel private
	succeeds "$tree/out/amd64/ztunnel-$version"
	no_secret
}

@test "a token in a file" {
	elf "$(ztunnel_file)" amd64
	printf '%s\r\n' "$token" >"$BATS_TEST_TMPDIR/secret"
	ARTIFACT_AUTH=token-file=$BATS_TEST_TMPDIR/secret ztunnel private
	succeeds "$tree/out/amd64/ztunnel-$version"
	[ ! -s "$STATE/gcloud.argv" ]
	no_secret
}

@test "a token file that is missing or holds something else" {
	ARTIFACT_AUTH=token-file=/nowhere ztunnel ok
	fails token-file=/nowhere
	printf 'Bearer %s\n' "$token" >"$BATS_TEST_TMPDIR/secret"
	ARTIFACT_AUTH=token-file=$BATS_TEST_TMPDIR/secret ztunnel ok
	fails "not just one token"
	printf '%s"\noutput = "/tmp/x\n' "$token" >"$BATS_TEST_TMPDIR/secret"
	ARTIFACT_AUTH=token-file=$BATS_TEST_TMPDIR/secret ztunnel ok
	fails "not just one token"
	[ "$(asked)" -eq 0 ]
}

@test "ARTIFACT_AUTH=none asks without a token" {
	elf "$(ztunnel_file)" amd64
	ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-$version"
	[ "$(asked_with authorization)" = "" ]
	[ ! -s "$STATE/gcloud.argv" ]
}

@test "gcloud missing" {
	mkdir "$BATS_TEST_TMPDIR/bin"
	local dir file
	for dir in ${PATH//:/ }; do
		for file in "$dir"/*; do
			[ "${file##*/}" = gcloud ] || ln -sf "$file" "$BATS_TEST_TMPDIR/bin/" 2>/dev/null || true
		done
	done
	ARTIFACT_AUTH=auto PATH=$BATS_TEST_TMPDIR/bin ztunnel ok
	fails "$(base ok)/ztunnel-$version-amd64" "no gcloud command" ARTIFACT_AUTH=none token-file=PATH
	[ "$(asked)" -eq 0 ]
}

@test "gcloud not logged in" {
	printf 'logged-out\n' >"$STATE/gcloud"
	ARTIFACT_AUTH=auto ztunnel ok
	fails "$(base ok)/ztunnel-$version-amd64" "nobody is logged in" "gcloud auth login"
	[ "$(asked)" -eq 0 ]
}

@test "gcloud prints no token" {
	printf 'junk\n' >"$STATE/gcloud"
	ARTIFACT_AUTH=auto ztunnel ok
	fails "$(base ok)/ztunnel-$version-amd64" "nothing that could be a token"
	[ "$(asked)" -eq 0 ]
}

@test "Istio's own mirrors get no token, whatever is asked for" {
	printf '%s\n' "storage.googleapis.com:443:127.0.0.1:$named_port" >"$STATE/connect-to"
	mkdir -p "$MIRROR_DIR/files/istio-build/ztunnel" "$MIRROR_DIR/files/istio-build/proxy"
	public=$MIRROR_DIR/files/istio-build/ztunnel/ztunnel-$id-amd64
	elf "$public" amd64
	export ZTUNNEL_VERSION=$id
	for auth in auto gcloud; do
		ARTIFACT_AUTH=$auth ISTIO_ZTUNNEL_BASE_URL='' ztunnel ok
		succeeds "$tree/out/amd64/ztunnel-$id"
		rm -r "$tree/out"
	done
	printf '%s\n' "blob.istio.io:443:127.0.0.1:$named_port" >"$STATE/connect-to"
	ARTIFACT_AUTH=auto ISTIO_ZTUNNEL_BASE_URL=https://blob.istio.io/istio-build/ztunnel/ ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-$id"
	[ ! -s "$STATE/gcloud.argv" ]
	[ "$(grep -c -F "ztunnel-$id-amd64\",\"query\":\"\",\"authorization\":\"\"" "$MIRROR_DIR/log")" -eq 3 ]
}

@test "what only looks like one of Istio's mirrors is private" {
	for base in https://storage.googleapis.com/istio-build/ztunnel2 https://storage.googleapis.com.example/istio-build/ztunnel \
		https://blob.istio.io/istio-build/../mine https://blob.istio.io/other; do
		ARTIFACT_AUTH=auto ISTIO_ZTUNNEL_BASE_URL=$base ztunnel ok --dry-run
		[[ $output == *"token of gcloud"* ]]
	done
}

@test "a private ztunnel sends no token to a public Envoy base" {
	printf '%s\n' "storage.googleapis.com:443:127.0.0.1:$named_port" >"$STATE/connect-to"
	mkdir -p "$MIRROR_DIR/files/istio-build/proxy"
	elf "$(ztunnel_file)" amd64
	elf "$BATS_TEST_TMPDIR/envoy" amd64
	export ENVOY_VERSION=$id ARTIFACT_AUTH=auto ISTIO_ENVOY_BASE_URL=''
	envoy_archive "$MIRROR_DIR/files/istio-build/proxy/envoy-alpha-$id.tar.gz" "$BATS_TEST_TMPDIR/envoy"
	ISTIO_ZTUNNEL_BASE_URL=$(base private)
	export ISTIO_ZTUNNEL_BASE_URL
	ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-$version"
	envoy ok
	succeeds "$tree/out/amd64/envoy-$id"
	grep -F "envoy-alpha-$id.tar.gz\",\"query\":\"\",\"authorization\":\"\"" "$MIRROR_DIR/log"
	[ "$(wc -l <"$STATE/gcloud.argv")" -eq 1 ]
}

@test "the token goes along a redirect within the host, not to another one, and stays away" {
	elf "$(ztunnel_file)" amd64
	export ARTIFACT_AUTH=gcloud
	for way in "same:named Bearer $token;named Bearer $token" \
		"other:named Bearer $token;other " \
		"back:named Bearer $token;other ;named "; do
		: >"$STATE/curl.argv"
		forget
		ztunnel "redirect=${way%%:*}"
		succeeds "$tree/out/amd64/ztunnel-$version"
		rm -r "$tree/out"
		seen=$(requests | sed -E 's/.*"server":"([a-z]*)".*"authorization":"([^"]*)".*/\1 \2/' | paste -s -d ';')
		[ "$seen" = "${way#*:}" ]
		no_secret
	done
}

@test "a redirect to plain http or to a file is not followed" {
	export ARTIFACT_AUTH=gcloud
	ztunnel redirect=plain
	fails "no https:// URL" "$(base redirect=plain)/ztunnel-$version-amd64"
	ztunnel redirect=file
	fails "no https:// URL"
	[ "$(asked plain)" -eq 0 ]
	ztunnel redirect=loop
	fails "redirected more than 5 times"
}

@test "a host that was redirected to and refuses is named, without the query" {
	ARTIFACT_AUTH=gcloud ztunnel redirect=denied
	fails "$(base redirect=denied)/ztunnel-$version-amd64" "redirected to https://127.0.0.1:$other_port" 403 "not sent to another host"
}

@test "no trace shows the token: bash -x, an inherited xtrace, a file descriptor for it" {
	elf "$(ztunnel_file)" amd64
	export ARTIFACT_AUTH=gcloud ISTIO_ZTUNNEL_BASE_URL
	ISTIO_ZTUNNEL_BASE_URL="$(base private)?sig=presigned-secret"
	run --separate-stderr bash -x "$tree/tools/download-ztunnel.sh"
	succeeds "$tree/out/amd64/ztunnel-$version"
	[[ $stderr == *"set +x"* ]]
	no_secret
	rm -r "$tree/out"
	run --separate-stderr bash -xv "$tree/tools/download-ztunnel.sh"
	succeeds "$tree/out/amd64/ztunnel-$version"
	no_secret
	rm -r "$tree/out"
	run --separate-stderr env SHELLOPTS=xtrace:allexport "$tree/tools/download-ztunnel.sh"
	succeeds "$tree/out/amd64/ztunnel-$version"
	[[ $stderr == *"+ set +x"* ]]
	no_secret
	rm -r "$tree/out"
	printf 'set -x\n' >"$BATS_TEST_TMPDIR/env"
	run --separate-stderr env BASH_ENV="$BATS_TEST_TMPDIR/env" "$tree/tools/download-ztunnel.sh"
	succeeds "$tree/out/amd64/ztunnel-$version"
	no_secret
	rm -r "$tree/out"
	# shellcheck disable=SC2016
	run --separate-stderr bash -c 'exec 7>"$1"; BASH_XTRACEFD=7 SHELLOPTS=xtrace "$2"' - "$STATE/trace.argv" "$tree/tools/download-ztunnel.sh"
	succeeds "$tree/out/amd64/ztunnel-$version"
	no_secret
}

@test "variables of the environment do not carry the token to curl" {
	elf "$(ztunnel_file)" amd64
	export ARTIFACT_AUTH=gcloud bearer=x url=x here=x redirect=x answer=x line=x text=x artifact=x
	secret=$token
	export token=x
	ztunnel private
	token=$secret
	export -n token
	succeeds "$tree/out/amd64/ztunnel-$version"
	no_secret
}

@test "~/.curlrc is not read: it could trace, or trust everybody" {
	elf "$(ztunnel_file)" amd64
	mkdir "$BATS_TEST_TMPDIR/home"
	printf 'trace-ascii = "%s"\nverbose\nlocation-trusted\n' "$STATE/trace.argv" >"$BATS_TEST_TMPDIR/home/.curlrc"
	HOME=$BATS_TEST_TMPDIR/home ARTIFACT_AUTH=gcloud ztunnel redirect=other
	succeeds "$tree/out/amd64/ztunnel-$version"
	[ ! -e "$STATE/trace.argv" ]
	[ "$(asked_with authorization | tail -n 1)" = "" ]
	no_secret
}

@test "a token that is refused, and one that is missing" {
	printf 'another\n' >"$files/token"
	ARTIFACT_AUTH=gcloud ztunnel private
	fails "$(base private)/ztunnel-$version-amd64" 401 "refuses the token" "gcloud auth list"
	ztunnel status=403
	fails 403 ARTIFACT_AUTH=gcloud
	[ ! -s "$STATE/sleep.argv" ]
}

@test "s3:// is presigned by aws, and its query is not shown" {
	elf "$(ztunnel_file)" amd64
	base ok >"$STATE/presigned"
	export ISTIO_ZTUNNEL_BASE_URL=s3://bucket/some/where/
	ARTIFACT_AUTH=auto ztunnel ok
	succeeds "$tree/out/amd64/ztunnel-$version"
	[[ $(cat "$STATE/aws.argv") == "s3 presign s3://bucket/some/where/ztunnel-$version-amd64 --expires-in "* ]]
	[ "$(asked_with query)" = X-Amz-Signature=presigned-secret ]
	[ "$(asked_with authorization)" = "" ]
	no_secret
	rm -r "$tree/out"
	base status=403 >"$STATE/presigned"
	ztunnel ok
	fails "s3://bucket/some/where/ztunnel-$version-amd64" 403 "AWS account"
	base redirect=plain >"$STATE/presigned"
	ztunnel ok
	fails "s3://bucket/some/where/ztunnel-$version-amd64"
	printf 'https://localhost:1\n' >"$STATE/presigned"
	ztunnel ok
	fails "s3://bucket/some/where/ztunnel-$version-amd64" "connect"
	rm "$STATE/presigned"
	ztunnel ok
	fails "aws s3 presign failed"
}

@test "a server whose certificate nobody trusts gets no token" {
	unset CURL_CA_BUNDLE
	ARTIFACT_AUTH=gcloud ztunnel ok
	fails "$(base ok)/ztunnel-$version-amd64" certificate CURL_CA_BUNDLE
	[ "$(asked)" -eq 0 ]
	[ ! -s "$STATE/sleep.argv" ]
}
