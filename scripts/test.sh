#!/usr/bin/env bash
# Runs every Go test with the race detector. Prints the failures, what was skipped and why, and the
# totals as the last line. Arguments are passed to `go test`; the default is every package.
set -euo pipefail
cd "$(dirname "$0")/.."

go=${GO:-go}
# What takes longest comes first, so that it does not end alone, long after everything else.
[ $# -gt 0 ] || set -- ./integration ./disk/qcow2 ./registry ./disk/instance ./disk/overlay \
	./cmd/kubevirt-disk ./integration/... ./target/... ./...

race=(-race)
if ! command -v "${CC:-gcc}" >/dev/null; then
	echo "test: no C compiler, so the tests run without the race detector" >&2
	[ "${KUBEVIRT_DISK_REQUIRE_TOOLS:-}" != 1 ] || exit 1
	race=()
fi
# The race detector makes these compressors several times slower. They compute in one goroutine, and
# are not our code. Our code that calls them is watched. The binary that tests build gets the same
# flags, so that nothing is compiled twice.
GOFLAGS=$("$go" env GOFLAGS)
for package in compress/flate hash/adler32 github.com/klauspost/compress/{flate,fse,huff0}; do
	GOFLAGS+=" -gcflags=$package=-race=false"
done
export GOFLAGS

mkdir -p bin
"$go" build -o bin/testsum ./scripts/testsum
# The linter has run go vet. One more test than processors runs at a time: some only wait.
"$go" test -json -count=1 -timeout 60m -vet=off -parallel $(($(nproc) + 1)) "${race[@]}" "$@" |
	bin/testsum
