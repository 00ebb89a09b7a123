# SPDX-License-Identifier: Apache-2.0
#
# Everything here also works for an ordinary user; only installing Debian
# packages needs root, and where that is not so the missing ones are named.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Standard output belongs to what is run: `make demo ARGS=--json` prints JSON.
MAKEFLAGS += --no-print-directory --silent

export PATH := $(PATH):/usr/local/go/bin:/usr/sbin:/sbin

# What to pass to the program that demo or bench runs, and to go test.
ARGS ?=
TESTFLAGS ?=

# Which packages `make test` takes; without it all, also those of other modules.
PKGS ?=

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X main.version=$(VERSION)
# -trimpath and no VCS stamp: the same sources give the same bytes anywhere.
# grpcnotrace leaves out a debugging page of gRPC that has templates, which may call any
# method by name: with them the linker drops none, and the agent is 6 MB larger on disk and 4
# in memory.
GO_BUILD := CGO_ENABLED=0 go build -trimpath -buildvcs=false -tags=grpcnotrace -ldflags '$(LDFLAGS)'
COMMON := ./common.sh

.PHONY: help
help: ## Show these targets.
	awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	echo
	echo "  ARGS=...         arguments for demo (--json, --hold, --redirection=iptables), bench, lint (--fix)"
	echo '  PKGS=...         the packages that test takes (./iptables/...); all unless given'
	echo '  TESTFLAGS=...    flags for go test (-short, -run=NAME, -count=1)'
	echo '  NODES=1          a smaller cluster for e2e; NODE_PROXY=ztunnel another node proxy'
	echo '  VERSION=...      the version stamped into the binaries; from git unless given'

.PHONY: require-go
require-go:
	$(COMMON) require_go

.PHONY: build
build: require-go ## Build bin/ambientd, bin/ambient-cni and bin/devproxy, static, and tell their sizes.
	mkdir -p bin
	$(GO_BUILD) -o bin/ambientd ./nodeagent
	$(GO_BUILD) -o bin/ambient-cni ./cni-plugin
	$(GO_BUILD) -o bin/devproxy ./tools/devproxy
	$(COMMON) tell_sizes bin/ambientd bin/ambient-cni bin/devproxy

# Images are for nodes, which may have another architecture than this machine.
TARGET_ARCH ?= $(shell go env GOARCH)

.PHONY: image
image: require-go ## Make out/image/*.tar, images that a container runtime imports (TARGET_ARCH=arm64 for others).
	mkdir -p out/image/$(TARGET_ARCH)
	GOARCH=$(TARGET_ARCH) $(GO_BUILD) -o out/image/$(TARGET_ARCH)/ambientd ./nodeagent
	GOARCH=$(TARGET_ARCH) $(GO_BUILD) -o out/image/$(TARGET_ARCH)/ambient-cni ./cni-plugin
	GOARCH=$(TARGET_ARCH) $(GO_BUILD) -o out/image/$(TARGET_ARCH)/devproxy ./tools/devproxy
	GOARCH=$(TARGET_ARCH) $(GO_BUILD) -o out/image/$(TARGET_ARCH)/testapp ./tools/e2e/testapp
	CGO_ENABLED=0 go -C tools/image build -trimpath -o ../../out/imagetool .
	out/imagetool --bin=out/image/$(TARGET_ARCH) --out=out/image --arch=$(TARGET_ARCH) $(ARGS)

# Where ztunnel was fetched or built, it is the node proxy of the image; else devproxy.
.PHONY: dev-image
dev-image: image ## Make out/image/ambientd-dev.tar: ambientd with a fetched ztunnel, or else with devproxy.
	proxy=devproxy; \
	if [ -e out/$(TARGET_ARCH)/ztunnel ]; then \
		proxy=ztunnel; cp -L out/$(TARGET_ARCH)/ztunnel out/image/$(TARGET_ARCH)/ztunnel; \
	fi; \
	out/imagetool --bin=out/image/$(TARGET_ARCH) --out=out/image --arch=$(TARGET_ARCH) --node-proxy=$$proxy ambientd-dev

.PHONY: ztunnel
ztunnel: require-go ## Fetch ztunnel into out/ARCH, unless it is there (tools/download-ztunnel.sh --help).
	TARGET_ARCH=$(TARGET_ARCH) tools/download-ztunnel.sh

.PHONY: envoy
envoy: require-go ## Fetch Envoy into out/ARCH, unless it is there (tools/download-envoy.sh --help).
	TARGET_ARCH=$(TARGET_ARCH) tools/download-envoy.sh

# The race detector is what needs a C compiler; the kernel tests drive iptables
# and read back what the nftables backend wrote with nft.
.PHONY: require-test
require-test: require-go
	$(COMMON) require_kernel
	$(COMMON) require_commands iptables-nft-restore:iptables nft:nftables ipset:ipset ip:iproute2
	$(COMMON) require_race

.PHONY: test
test: require-test ## Run all tests, or those of PKGS, with the race detector (installs what they need, as root on Debian).
	$(COMMON) compile_tests $(or $(PKGS),./...)
	CGO_ENABLED=1 go test -race $(TESTFLAGS) $(or $(PKGS),./...)
ifeq ($(PKGS),)
	CGO_ENABLED=1 go -C tools/image test -race $(TESTFLAGS) ./...
	$(MAKE) test-scripts
endif

.PHONY: test-scripts
test-scripts: require-go ## Run the tests of tools/download-*.sh, against a mirror of their own.
	$(COMMON) require_commands bats:bats curl:curl script:bsdutils
	bats tools/download/test

.PHONY: devcluster
devcluster: require-go ## Build out/devcluster, a real Kubernetes in namespaces of its own (out/devcluster --help).
	$(COMMON) require_kernel
	$(COMMON) require_commands ip:iproute2 etcd:etcd-server containerd:containerd runc:runc busybox:busybox-static
	mkdir -p out
	CGO_ENABLED=0 go -C tools/devcluster build -trimpath -buildvcs=false -o ../../out/devcluster .

# Compiled before the cluster is there: inside of it is no network to download modules
# from, and nothing should wait in memory meanwhile.
.PHONY: test-api
test-api: require-test devcluster ## Run the tests that need a Kubernetes API server, against a real one (as root).
	packages=$$($(COMMON) api_test_packages) && \
		CGO_ENABLED=1 go test -race -tags=apitest -run='^$$' -exec=true $$packages >/dev/null && \
		CGO_ENABLED=1 out/devcluster run --nodes=0 -- go test -race -tags=apitest $(TESTFLAGS) $$packages

# How many nodes the end-to-end tests get, and what is the node proxy on them.
NODES ?= 2
NODE_PROXY ?= devproxy

.PHONY: require-node-proxy
require-node-proxy:
	$(COMMON) require_node_proxy $(NODE_PROXY) $(TARGET_ARCH)

# Compiled before the cluster is there, as for test-api.
.PHONY: e2e
e2e: require-node-proxy require-test devcluster $(if $(filter ztunnel,$(NODE_PROXY)),dev-image,image) ## Run ambientd on a real cluster of NODES=2 and see what becomes of pods (as root).
	$(COMMON) require_commands containerd:containerd runc:runc busybox:busybox-static
	CGO_ENABLED=1 go test -race -tags=e2e -run='^$$' -exec=true ./tools/e2e >/dev/null
	CGO_ENABLED=1 E2E_NODE_PROXY=$(NODE_PROXY) out/devcluster run --nodes=$(NODES) \
		$(patsubst %,--image=out/image/%.tar,ambientd testapp $(if $(filter ztunnel,$(NODE_PROXY)),ambientd-dev,$(NODE_PROXY))) -- \
		go test -race -tags=e2e -v -count=1 -timeout=15m $(TESTFLAGS) ./tools/e2e

# How long `make soak` lets pods come and go.
SOAK ?= 10m

.PHONY: soak
soak: require-test devcluster ## Let pods come and go for SOAK=10m while the agent is killed, and see that nothing stays (as root).
	CGO_ENABLED=1 go test -race -tags=apitest -run='^$$' -exec=true ./nodeagent/agent/onkubernetes >/dev/null
	CGO_ENABLED=1 SOAK=$(SOAK) out/devcluster run --nodes=0 -- \
		go test -race -tags=apitest -v -count=1 -timeout=1h -run='^TestSoak$$' $(TESTFLAGS) ./nodeagent/agent/onkubernetes

.PHONY: test-devcluster
test-devcluster: require-test devcluster ## Run the tests of the cluster that test-api uses (as root).
	CGO_ENABLED=1 go -C tools/devcluster test -race $(TESTFLAGS) ./...

.PHONY: demo
demo: build ## Walk pods through the mesh in namespaces of their own, and check each step.
	$(COMMON) require_kernel
	$(COMMON) require_commands $(if $(findstring iptables,$(ARGS)),iptables-nft-restore:iptables)
	mkdir -p out
	$(GO_BUILD) -o out/demo ./tools/demo
	plugins=$$($(COMMON) build_tools tools/cniplugins) && \
		out/demo --bin=bin --cni-bin="$$plugins" $(ARGS)

.PHONY: build-bench
build-bench: build
	$(COMMON) require_kernel
	mkdir -p out
	$(GO_BUILD) -o out/bench ./tools/bench
	$(GO_BUILD) -o out/noop-plugin ./tools/bench/noop-plugin

# First what needs an API server, so that it is gone when the rest is measured. Nobody
# but root can have one: then its rows are missing, and no results are written. So
# with single parts.
.PHONY: bench
bench: build-bench $(if $(filter 0,$(shell id -u)),devcluster) ## Measure what ambientd costs, with an API server where root runs it, and check the limits.
	$(COMMON) require_commands iptables-nft-restore:iptables
	if [ "$$(id -u)" -eq 0 ] && [ -z "$(findstring --parts,$(ARGS))" ]; then \
		out/devcluster run --nodes=0 -- out/bench --api --save=out/bench-api.json --bin=bin --noop-plugin=out/noop-plugin && \
			set -- --add=out/bench-api.json; \
	fi && \
		out/bench --bin=bin --noop-plugin=out/noop-plugin --results=bench/results "$$@" $(ARGS)

.PHONY: bench-api
bench-api: build-bench devcluster ## Of bench only what needs an API server (as root).
	out/devcluster run --nodes=0 -- out/bench --api --bin=bin --noop-plugin=out/noop-plugin $(ARGS)

.PHONY: lint
lint: require-go ## Check format, go vet, golangci-lint and shellcheck.
	$(COMMON) lint_format
	go vet ./... && go -C tools/devcluster vet ./...
	linter=$$($(COMMON) build_tools tools/lint) && \
		"$$linter/golangci-lint" run $(ARGS) ./... && \
		cd tools/devcluster && "$$linter/golangci-lint" run $(ARGS) ./...
	$(COMMON) require_commands shellcheck:shellcheck
	shellcheck -x common.sh .ci/run .ci/as-user tools/download-*.sh \
		tools/download/test/*.bats tools/download/test/*.bash tools/download/test/standins/*

.PHONY: generate
generate: require-go ## Write the generated code anew.
	$(COMMON) generate .

.PHONY: check-generated
check-generated: require-go ## Fail if committed generated code is not what its sources give.
	$(COMMON) check_generated

.PHONY: fences
fences: require-go ## Check which packages may import which, the plugin's size, and that no page is unfinished.
	go test -count=1 ./tools/fences

.PHONY: clean
clean: ## Remove what was built here (tools kept outside of the checkout stay).
	rm -rf bin out
