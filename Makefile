# kubevirt-disk: `make help` lists the targets.

SHELL := /bin/bash
GO ?= go
BIN := bin/kubevirt-disk
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
COMMIT ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
# The reference of the base image that push uses without --base; empty: --base is required.
BASE ?=
CONTROLLER := bin/kubevirt-disk-controller
LDFLAGS := -s -w -X main.version=$(VERSION) -X main.commit=$(COMMIT) $(if $(BASE),-X main.base=$(BASE))
CONTROLLER_LDFLAGS := -s -w -X main.version=$(VERSION) -X main.commit=$(COMMIT)
# Without inlining, these take 400 KB less of the 24 MiB. None of them is on the way of a guest's request.
SMALL := $(foreach package,github.com/pelletier github.com/prometheus github.com/spf13 go.yaml.in \
	google.golang.org/protobuf,-gcflags='$(package)/...=-l')
BUILD := CGO_ENABLED=0 GOOS=linux $(GO) build -trimpath $(SMALL) -ldflags '$(LDFLAGS)'

# Seconds for each fuzz test: few in `make test-ci`, more in `make fuzz`.
FUZZTIME ?= 60s
TEST_FUZZTIME ?= 1s
# Options of the benchmark program, for example BENCHFLAGS='-rounds 3 -only scsi'.
BENCHFLAGS ?=
# The name that `make image` gives the base image.
IMAGE ?= kubevirt.io:disk
# Further options of scripts/tools/chart.
CHARTFLAGS ?=
# The name that `make adapter-image` gives the image with the kernel for container images.
ADAPTER_IMAGE ?= kubevirt.io:adapter
# The name that `make controller-image` gives the image of the Kubernetes controller.
CONTROLLER_IMAGE ?= kubevirt.io:disk-controller
# The files that boot container images: cache/machine/ARCH/vmlinuz and initrd.
MACHINE := cache/machine

.DEFAULT_GOAL := help
.PHONY: build generate manifests controller controller-image image adapter-image machine run run-container test test-cluster test-kubevirt test-ci test-nightly test-quick check lint fuzz bench peers demo clean help FORCE

build: $(BIN) $(BIN)-linux-arm64 ## Build the static binaries into bin/ (this machine's, and linux/arm64)

$(BIN): FORCE
	$(BUILD) -o $@ ./cmd/kubevirt-disk

$(BIN)-linux-amd64 $(BIN)-linux-arm64: $(BIN)-linux-%: FORCE
	GOARCH=$* $(BUILD) -o $@ ./cmd/kubevirt-disk

generate: ## Make what is made from the Kubernetes API types and the messages of KubeVirt's hooks (needs protoc)
	scripts/generate.sh
	scripts/generate-proto.sh

manifests: ## Write bin/kubevirt-disk-controller.yaml, for kubectl apply, from the Helm chart (CHARTFLAGS='-set KEY=VALUE' changes its values)
	mkdir -p bin
	install -m 600 /dev/null bin/kubevirt-disk-controller.yaml.new # it has a key
	$(GO) run -C scripts/tools ./chart -manifest -keep $(CURDIR)/bin/kubevirt-disk-controller.yaml \
		-set namespace.create=true -set images.controller='$(CONTROLLER_IMAGE)' -set images.server='$(IMAGE)' \
		$(CHARTFLAGS) >bin/kubevirt-disk-controller.yaml.new
	mv bin/kubevirt-disk-controller.yaml.new bin/kubevirt-disk-controller.yaml

controller: $(CONTROLLER)-linux-amd64 $(CONTROLLER)-linux-arm64 ## Build kubevirt-disk-controller, for Kubernetes, into bin/

$(CONTROLLER)-linux-amd64 $(CONTROLLER)-linux-arm64: $(CONTROLLER)-linux-%: FORCE
	CGO_ENABLED=0 GOOS=linux GOARCH=$* $(GO) build -C kubernetes -trimpath -ldflags '$(CONTROLLER_LDFLAGS)' -o ../$@ ./command

# All files get the same time, so that the same binaries give the same digests.
bin/kubevirt-disk-controller-LICENSES: FORCE
	mkdir -p bin && scripts/licenses.sh kubernetes ./command >$@

controller-image: controller bin/kubevirt-disk-controller-LICENSES ## Build the image kubevirt.io:disk-controller for linux/amd64 and linux/arm64 with buildah
	buildah manifest rm '$(CONTROLLER_IMAGE)' >/dev/null 2>&1 || true
	buildah build --quiet --platform linux/amd64,linux/arm64 --manifest '$(CONTROLLER_IMAGE)' \
		--timestamp "$$(git log -1 --format=%ct 2>/dev/null || echo 0)" --identity-label=false \
		--build-arg 'VERSION=$(VERSION)' --build-arg 'REVISION=$(COMMIT)' --file Containerfile.controller bin

image: $(BIN)-linux-amd64 $(BIN)-linux-arm64 ## Build the base image kubevirt.io:disk for linux/amd64 and linux/arm64 with buildah, and print its size
	VERSION='$(VERSION)' REVISION='$(COMMIT)' scripts/build-image.sh '$(IMAGE)' $^

bin/kubevirt-disk-init-linux-amd64 bin/kubevirt-disk-init-linux-arm64: bin/kubevirt-disk-init-linux-%: FORCE
	CGO_ENABLED=0 GOOS=linux GOARCH=$* $(GO) build -trimpath -ldflags '-s -w' -o $@ ./cmd/kubevirt-disk-init

# KERNELFLAGS=--update looks for a later kernel than the one that was fetched; --any takes one that is too old, too.
$(MACHINE)/amd64/initrd $(MACHINE)/arm64/initrd: $(MACHINE)/%/initrd: bin/kubevirt-disk-init-linux-% FORCE
	scripts/fetch-kernel.sh $(KERNELFLAGS) $* cache/kernel
	$(GO) run ./scripts/mkinitrd cache/kernel/$*/root $< $(@D)

machine: $(MACHINE)/amd64/initrd $(MACHINE)/arm64/initrd ## Make the kernel and the initramfs that boot container images, into cache/machine (needs apt)

adapter-image: KERNELFLAGS ?= --update
adapter-image: $(BIN)-linux-amd64 $(BIN)-linux-arm64 machine ## Build the image kubevirt.io:adapter with buildah: the binary, and what boots container images
	VERSION='$(VERSION)' REVISION='$(COMMIT)' BOOT=$(MACHINE) KERNELS=cache/kernel \
		scripts/build-image.sh '$(ADAPTER_IMAGE)' $(BIN)-linux-amd64 $(BIN)-linux-arm64

run-container: KERNELFLAGS ?= --any
run-container: $(BIN) $(MACHINE)/$(shell $(GO) env GOARCH)/initrd ## Boot a small container image as a virtual machine in QEMU, and print what it says
	scripts/run-container.sh $(BIN) $(MACHINE)/$(shell $(GO) env GOARCH)

run: $(BIN) ## Serve the demo disk of examples/demo on 127.0.0.1 and print how to log in
	scripts/run-demo.sh $(BIN)

TESTS := INSTALL=scripts/install-tools.sh
CLUSTER := BUILD='scripts/build-kubernetes.sh --node'
CLIENTS := scripts/build-clients.sh
LAUNCHER := scripts/build-launcher.sh
KUBEVIRT := scripts/build-kubevirt.sh
NIGHTLY := scripts/build-kubernetes.sh --oldest;$(CLIENTS);$(LAUNCHER);$(LAUNCHER) launcher19;$(KUBEVIRT);scripts/build-client.sh cosign;scripts/build-client.sh cosign3;scripts/build-client.sh oras;scripts/build-client.sh registry
BOTH := PARTS='main cluster' BESIDE='scripts/lint.sh scripts/fuzz.sh' FUZZTIME=$(TEST_FUZZTIME)

test: ## Every test but those of a cluster; installs missing tools when root
	$(TESTS) BUILD_INSTALLED='$(CLIENTS)' scripts/test.sh

test-cluster: ## The tests with Kubernetes, and with the launcher of KubeVirt
	$(TESTS) $(CLUSTER) BUILD_INSTALLED='$(LAUNCHER)' PARTS=cluster scripts/test.sh

test-kubevirt: ## The tests with a whole KubeVirt, on two nodes; as root
	$(TESTS) $(CLUSTER) BUILD_INSTALLED='$(KUBEVIRT)' PARTS=kubevirt KUBEVIRT_DISK_NIGHTLY=1 scripts/test.sh

test-ci: ## Both, and beside them lint and fuzz for seconds: what CI runs
	$(TESTS) $(CLUSTER) BUILD_INSTALLED='$(CLIENTS);$(LAUNCHER)' $(BOTH) scripts/test.sh

test-nightly: ## As make test-ci, but all with the race detector, more clients and guests, and more of what is made up at random
	$(TESTS) $(CLUSTER) BUILD_INSTALLED='$(NIGHTLY)' $(BOTH) RACE=yes KUBEVIRT_DISK_NIGHTLY=1 scripts/test.sh

test-quick: ## The tests that need neither Kubernetes nor guests, containers or other clients; no race detector
	RACE=no scripts/test.sh -short $$($(GO) list ./... | grep -vE '/integration(/|$$)')

check: ## The everyday loop: lint, and the tests of what changed and of what imports it (BASE=main: since main)
	scripts/check.sh

lint: ## Check with gofmt, go vet, staticcheck and shellcheck, and Markdown for at most 120 columns
	scripts/lint.sh

fuzz: ## Run every fuzz test for FUZZTIME (60s)
	FUZZTIME=$(FUZZTIME) scripts/fuzz.sh

bench: $(BIN) peers ## Measure against tgtd, gotgt, qemu-img convert and a bare loop in C, as root (BENCHFLAGS=-h lists the options)
	$(GO) run ./integration/bench -server $(BIN) $(BENCHFLAGS)
	set -o pipefail; KUBEVIRT_DISK_PEERS=$(CURDIR)/cache/gotgt $(GO) test -count=1 -run 'TestConformance(Peers)?$$' -v ./integration/iscsi | grep -E '^(conformance:|---|FAIL)'

peers: ## Build gotgt, a peer of the benchmarks, into cache/
	scripts/build-gotgt.sh cache/gotgt

demo: ## Make the demo disk of examples/demo again (needs mke2fs and qemu-img)
	examples/demo/make-demo.sh

clean: ## Remove the binaries, and the files that benchmarks keep
	rm -rf bin cache

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

FORCE:
