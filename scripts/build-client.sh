#!/usr/bin/env bash
# Builds a client of registries from its module, to test with: cosign signs and verifies what we verify
# and sign, and oras stores and reads artifacts. cosign takes eight minutes of one processor, so the
# tests of both are nightly. Prints the binary.
#
# It is cache/NAME/VERSION/NAME. KUBEVIRT_DISK_COSIGN and KUBEVIRT_DISK_ORAS name another directory
# than cache/NAME, which several checkouts can share.
set -euo pipefail
cd "$(dirname "$0")/.."

name=${1:-}
case $name in # the versions are those of integration/registry/cosign_test.go
cosign) version=v2.6.5 package=github.com/sigstore/cosign/v2/cmd/cosign out=${KUBEVIRT_DISK_COSIGN:-} ;;
oras) version=v1.3.6 package=oras.land/oras/cmd/oras out=${KUBEVIRT_DISK_ORAS:-} ;;
*)
	echo "usage: $0 cosign|oras" >&2
	exit 2
	;;
esac
out=${out:-$PWD/cache/$name}/$version
mkdir -p "$out"
exec 9>"$out/lock" # two at once would build everything twice
flock 9
if [ ! -x "$out/$name" ]; then
	echo "build-client: $name $version" >&2
	new=$(mktemp -d "$out/new.XXXXXX")
	trap 'rm -rf "$new"' EXIT
	CGO_ENABLED=0 GOBIN=$new "${GO:-go}" install -trimpath -ldflags '-s -w' "$package@$version"
	mv "$new/$name" "$out/$name"
fi
echo "$out/$name"
