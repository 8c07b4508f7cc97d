#!/usr/bin/env bash
# Runs every Go test with the race detector. Prints the failures, what was skipped and why, and the
# totals as the last line. Arguments are passed to `go test`; the default is every package.
set -euo pipefail
cd "$(dirname "$0")/.."

go=${GO:-go}
[ $# -gt 0 ] || set -- ./...

race=(-race)
if ! command -v "${CC:-gcc}" >/dev/null; then
	echo "test: no C compiler, so the tests run without the race detector" >&2
	[ "${KUBEVIRT_DISK_REQUIRE_TOOLS:-}" != 1 ] || exit 1
	race=()
fi

mkdir -p bin
"$go" build -o bin/testsum ./scripts/testsum
"$go" test -json -count=1 -timeout 60m "${race[@]}" "$@" | bin/testsum
