#!/usr/bin/env bash
# Builds oras, with which a test stores artifacts that we read, and reads those that we store. The test
# is skipped without the binary, also where other missing tools are an error. Prints the binary.
#
# It is cache/oras/VERSION/oras. KUBEVIRT_DISK_ORAS names another directory than cache/oras, which
# several checkouts can share.
set -euo pipefail
cd "$(dirname "$0")/.."

version=v1.3.6 # orasVersion in integration/oras_test.go is the same
out=${KUBEVIRT_DISK_ORAS:-$PWD/cache/oras}/$version
mkdir -p "$out"
exec 9>"$out/lock" # two at once would build everything twice
flock 9
if [ ! -x "$out/oras" ]; then
	new=$(mktemp -d "$out/new.XXXXXX")
	trap 'rm -rf "$new"' EXIT
	CGO_ENABLED=0 GOBIN=$new "${GO:-go}" install -trimpath -ldflags '-s -w' "oras.land/oras/cmd/oras@$version"
	mv "$new/oras" "$out/oras"
fi
echo "$out/oras"
