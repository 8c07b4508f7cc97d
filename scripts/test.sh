#!/usr/bin/env bash
# Runs every Go test with the race detector. Prints the failures, what was skipped and why, and the
# totals as the last line. Arguments are passed to `go test`; the default is every package. One or two
# failed tests of integration run again alone, three times; they are named as unstable if they pass.
#
# BESIDE names programs that run one after the other beside the tests, which often only wait. What
# one prints appears when it has ended. If one fails, this fails.
set -euo pipefail
cd "$(dirname "$0")/.."

programs=${BESIDE:-}
unset BESIDE
go=${GO:-go}
all=
[ $# -gt 0 ] || all=1
# The longest tests come first, so that none of them runs alone at the end.
[ $# -gt 0 ] || set -- ./integration ./disk/qcow2 ./registry ./disk/instance ./disk/overlay \
	./cmd/kubevirt-disk ./integration/kubernetes/node ./adapter/ext4 ./disk/image ./target \
	./adapter ./kubernetes/controller/local ./integration/... ./target/... ./...

race=(-race)
if ! command -v "${CC:-gcc}" >/dev/null; then
	echo "test: no C compiler, so the tests run without the race detector" >&2
	[ "${KUBEVIRT_DISK_REQUIRE_TOOLS:-}" != 1 ] || exit 1
	race=()
fi
# The race detector makes these compressors several times slower. They compute in one goroutine, and
# are not our code. Our code that calls them is watched. The tests build the binary with the same
# flags, so that nothing is compiled twice.
plain=$("$go" env GOFLAGS)
GOFLAGS=$plain
for package in compress/flate hash/adler32 github.com/klauspost/compress/{flate,fse,huff0}; do
	GOFLAGS+=" -gcflags=$package=-race=false"
done
export GOFLAGS

# With the race detector, pools forget at random: tests that count allocations run without it, and
# count towards the same totals.
counting='^(TestNoAllocationPerCommand|TestReadsDoNotAllocate)$'
without=()
[ -z "$all" ] || [ ${#race[@]} -eq 0 ] || without=(-skip "$counting")

# beside runs the tests without the race detector, and the programs of BESIDE.
beside() {
	local program out failed=0
	if [ ${#without[@]} -gt 0 ]; then
		GOFLAGS=$plain "$go" test -json -count=1 -vet=off -run "$counting" ./target ./disk/qcow2 \
			>"$events" || failed=1
	fi
	for program in $programs; do
		if out=$(GOFLAGS=$plain "$program" 2>&1); then
			printf '%s\n' "$out" "ok    $program"
		else
			printf '%s\n' "$out" "FAIL  $program"
			failed=1
		fi
	done
	return $failed
}

test=("$go" test -json -count=1 -timeout 60m -vet=off "${race[@]}")
mkdir -p bin
"$go" build -o bin/testsum ./scripts/testsum
events=$(mktemp)
exec 3>&1 # past testsum
{
	set -m # a process group that can be ended as a whole
	beside >&3 2>&1 </dev/null &
	others=$!
	trap 'kill -- "-$others" 2>/dev/null || true; rm -f "$events"' EXIT
	set +m
	failed=0
	# The linter runs go vet. One more package, and one more test of each package, run at a time
	# than there are processors: some only wait.
	"${test[@]}" -p $(($(nproc) + 1)) -parallel $(($(nproc) + 1)) "${without[@]}" "$@" ||
		echo '{"Action":"command-failed"}'
	wait $others || {
		echo "FAIL  beside the tests, see above: $programs" # only skips and totals come later
		failed=1
	}
	cat "$events"
	exit $failed
} | bin/testsum "${test[@]}"
