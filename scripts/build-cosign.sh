#!/usr/bin/env bash
# Builds cosign, with which a test signs and verifies what we verify and sign. It takes eight minutes
# of one processor, so the test is one for nights and for people: it is skipped without the binary,
# also where other missing tools are an error. Prints the binary.
#
# It is cache/cosign/VERSION/cosign. KUBEVIRT_DISK_COSIGN names another directory than cache/cosign,
# which several checkouts can share.
set -euo pipefail
cd "$(dirname "$0")/.."

version=v2.6.5 # cosignVersion in integration/cosign_test.go is the same
out=${KUBEVIRT_DISK_COSIGN:-$PWD/cache/cosign}/$version
mkdir -p "$out"
exec 9>"$out/lock" # two at once would build everything twice
flock 9
if [ ! -x "$out/cosign" ]; then
	new=$(mktemp -d "$out/new.XXXXXX")
	trap 'rm -rf "$new"' EXIT
	CGO_ENABLED=0 GOBIN=$new "${GO:-go}" install -trimpath -ldflags '-s -w' "github.com/sigstore/cosign/v2/cmd/cosign@$version"
	mv "$new/cosign" "$out/cosign"
fi
echo "$out/cosign"
