#!/usr/bin/env bash
# Builds a program from its module, to test with: cosign signs and verifies what we verify and sign,
# and so does cosign3, the next generation of it; oras stores and reads artifacts, and registry is a
# later distribution than Debian's docker-registry. A cosign takes five to eight minutes of one
# processor, so the tests of all are nightly. Prints the binary.
#
# It is cache/NAME/VERSION/NAME. KUBEVIRT_DISK_COSIGN (_COSIGN3, _ORAS, _REGISTRY) names another
# directory than cache/NAME, which several checkouts can share.
set -euo pipefail
cd "$(dirname "$0")/.."

name=${1:-}
case $name in # the versions are those of integration/registry/cosign_test.go and rig/generations.go
cosign) version=v2.6.5 package=github.com/sigstore/cosign/v2/cmd/cosign out=${KUBEVIRT_DISK_COSIGN:-} ;;
cosign3) version=v3.1.3 package=github.com/sigstore/cosign/v3/cmd/cosign out=${KUBEVIRT_DISK_COSIGN3:-} ;;
oras) version=v1.3.6 package=oras.land/oras/cmd/oras out=${KUBEVIRT_DISK_ORAS:-} ;;
registry) version=v3.1.2 package=github.com/distribution/distribution/v3/cmd/registry out=${KUBEVIRT_DISK_REGISTRY:-} ;;
*)
	echo "usage: $0 cosign|cosign3|oras|registry" >&2
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
	mv "$new/${package##*/}" "$out/$name"
fi
echo "$out/$name"
