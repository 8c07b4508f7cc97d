#!/usr/bin/env bash
# Runs Go tests with the race detector. Prints a line a minute, the failures, what was skipped and
# why, the names of what failed, and the totals as the last line. Arguments are passed to `go test`;
# the default is every package: those that test one package first, then integration, then Kubernetes.
# One or two failed tests of integration run again alone, three times; they are named as unstable if
# they pass.
#
# BUILD is a command that builds what the last tests need. It runs beside the first ones, and the
# last ones wait for it. INSTALL is a program that ends before the first test. BUILD_INSTALLED names
# programs like BUILD that need what INSTALL installs. BESIDE names programs that run one after the
# other beside the tests, which often only wait. What one prints appears when it has ended. If one of
# all these fails, this fails. RACE=no leaves out the race detector.
set -euo pipefail
cd "$(dirname "$0")/.."

read -ra build <<<"${BUILD:-}"
read -ra build_installed <<<"${BUILD_INSTALLED:-}"
install=${INSTALL:-} programs=${BESIDE:-} go=${GO:-go}
unset BUILD BUILD_INSTALLED INSTALL BESIDE
plain=$("$go" env GOFLAGS)
mkdir -p bin
"$go" build -o bin/testsum ./scripts/testsum

dir=$(mktemp -d)
groups=() # of processes, each to be ended as a whole
cleanup() {
	local group
	for group in "${groups[@]}"; do
		kill -- "-$group" 2>/dev/null || true
	done
	rm -rf "$dir"
}
trap cleanup EXIT
exec 3>&1 # past testsum
background() {
	set -m
	"$@" >&3 2>&1 </dev/null &
	groups+=($!)
	set +m
}

# logged runs a program. From DIR/NAME.log testsum tells how far it is.
logged() {
	local name=${1##*/} status=0
	"$@" >"$dir/$name.log" 2>&1 || status=$?
	mv "$dir/$name.log" "$dir/$name"
	return $status
}

# The compiler makes no debugging data, which the linker would drop, and may use more memory to
# collect less garbage: for a big package, this saves 40 % of the time. Without -trimpath, a checkout
# in another directory would be compiled anew: that is 9 of 12 processor minutes.
fast="-trimpath -gcflags=all=-dwarf=false '-toolexec=env GOGC=300'"

# built runs a build after the tests in the scheduler's eyes: they are waited for.
built() {
	renice -n 10 "$BASHPID" >/dev/null 2>&1 || true
	if GOFLAGS="$plain $fast" logged "$@"; then
		echo "ok    $*"
	else
		echo "FAIL  $*, its last lines come at the end"
		echo "$*" >>"$dir/failed"
	fi
}

builders=()
# build_beside starts a build. The tests that need it wait for the lock that it holds. It has it when
# it first says something.
build_beside() {
	[ $# -gt 0 ] || return 0
	background built "$@"
	builders+=($!)
	for ((i = 0; i < 100; i++)); do
		if [ -s "$dir/${1##*/}.log" ] || ! kill -0 $! 2>/dev/null; then
			break
		fi
		sleep 0.1
	done
}
build_beside "${build[@]}"
[ -z "$install" ] || "$install"
for program in "${build_installed[@]}"; do
	build_beside "$program"
done

race=(-race)
if [ "${RACE:-}" = no ]; then
	race=()
elif ! command -v "${CC:-gcc}" >/dev/null; then
	echo "test: no C compiler, so the tests run without the race detector" >&2
	[ "${KUBEVIRT_DISK_REQUIRE_TOOLS:-}" != 1 ] || exit 1
	race=()
fi

# The race detector keeps notes of all memory, by default in small pages. With large ones, half of the
# kernel's work is gone, a third of the time that the tests of registry take.
[ ${#race[@]} = 0 ] || export GORACE="no_huge_pages_for_shadow=0 ${GORACE:-}"

# The race detector makes these compressors several times slower. They compute in one goroutine, and
# are not our code. Our code that calls them is watched. All that the tests and the programs beside
# them build has the same flags, so that nothing is compiled twice. Other flags even for one package
# would compile all that imports it once more.
if [ ${#race[@]} -gt 0 ]; then
	GOFLAGS="$plain $fast"
	for package in compress/flate hash/adler32 github.com/klauspost/compress/{flate,fse,huff0,zstd}; do
		# shellcheck disable=SC2089 # the go command reads the quotes
		GOFLAGS+=" '-gcflags=$package=-race=false -dwarf=false'"
	done
	# shellcheck disable=SC2090
	export GOFLAGS
	export TEST_GOFLAGS="$GOFLAGS -race" # for fuzz.sh
fi

# These run without the race detector, and count towards the same totals. With it, pools forget at
# random: the first tests count allocations. The others compute for long in one goroutine, where
# there is no race to find, and take several times as long with it: so `make test-nightly` runs them
# with it. A test of the same name in another package would run nowhere: a test of testsum looks for
# one.
tests=(TestNoAllocationPerCommand TestReadsDoNotAllocate)
in=(./target ./disk/qcow2)
tests+=(TestNoAllocationPerRequest TestRelayAllocatesNothing TestRemoteIsADisk TestRelayIsADisk)
in+=(./nbd)
if [ "${KUBEVIRT_DISK_NIGHTLY:-}" != 1 ]; then
	tests+=(TestCrashPoints TestFaultAtEveryCall TestSnapshotCrashPoints TestSnapshotFaultAtEveryCall)
	in+=(./disk/overlay)
	tests+=(TestFileOfManyGroups TestRandomLevels TestStateGoesOn TestSparseFilesAndTreesOfExtents)
	in+=(./adapter/ext4)
	tests+=(TestAtomicWriteCrashPoints)
	in+=(./target/internal/scsi)
	tests+=(TestPodOnAnotherNode TestDeletedWhileItMoves)
	in+=(./kubernetes/controller/local)
	tests+=(TestHandover TestServe TestVolume TestSecretDeletedByHand)
	in+=(./kubernetes/controller/service)
	tests+=(TestEveryRequestFailsOnce TestPet TestPopulate TestRetryConverges)
	in+=(./kubernetes/controller/{pet,pod,snapshot})
	tests+=(TestMemoryOf{Chunks,Digests,Index,Links,LongNames,ManyNames,RawDigests,SmallLayers})
	tests+=(TestMemoryOfTableOfContents TestPushOnto TestPushOnto{Others,Chains,KeepsBoot,Origin})
	tests+=(TestPushOnto{OneOfSeveral,SaysDead,Squash,SquashOneOfSeveral,SquashRefusals})
	in+=(./registry)
	tests+=(TestMemoryOfUploads)
	in+=(./volume/upload)
fi
plainly="^($(IFS='|' && echo "${tests[*]}"))\$"
without=()
if [ $# = 0 ]; then
	[ ${#race[@]} = 0 ] || without=(-skip "$plainly")
	# What takes longest comes first among its kind, so that none of it runs alone at the end.
	mapfile -t alone < <("$go" list ./... | grep -v '/integration\(/\|$\)')
	mapfile -t integration < <("$go" list ./integration/... | grep -v /integration/kubernetes)
	set -- ./disk/qcow2 ./registry ./disk/instance ./disk/overlay ./cmd/kubevirt-disk ./adapter/ext4 \
		./disk/image ./target ./adapter ./kubernetes/controller/local "${alone[@]}" \
		"${integration[@]}" ./integration/kubernetes/node ./integration/kubernetes/...
fi

# beside runs the tests without the race detector, and the programs of BESIDE. The build comes
# first: tests wait for it, and together they would slow each other down.
beside() {
	local builder program failed=0
	for builder in "${builders[@]}"; do
		tail --pid="$builder" -f /dev/null
	done
	if [ ${#without[@]} -gt 0 ]; then
		"$go" test -json -count=1 -vet=off -run "$plainly" "${in[@]}" \
			>"$dir/events" || failed=1
	fi
	for program in $programs; do
		if logged "$program"; then
			cat "$dir/${program##*/}"
			echo "ok    $program"
		else
			cat "$dir/${program##*/}"
			echo "FAIL  $program"
			failed=1
		fi
	done
	return $failed
}

# The nightly run has more rounds of many tests.
limit=40m
[ "${KUBEVIRT_DISK_NIGHTLY:-}" != 1 ] || limit=60m
test=("$go" test -json -count=1 -timeout 60m -exec "'$PWD/scripts/limit.sh' $limit" -vet=off "${race[@]}")
{
	background beside
	others=$!
	trap 'kill -- "-$others" 2>/dev/null || true' EXIT
	failed=0
	# The linter runs go vet. One more package, and one more test of each package, run at a time
	# than there are processors: some only wait.
	"${test[@]}" -p $(($(nproc) + 1)) -parallel $(($(nproc) + 1)) "${without[@]}" "$@" ||
		echo '{"Action":"command-failed"}'
	wait $others || {
		echo "FAIL  beside the tests, see above: $programs" # only skips and totals come later
		failed=1
	}
	[ ! -e "$dir/events" ] || cat "$dir/events"
	if [ -e "$dir/failed" ]; then
		while read -ra build; do
			tail -n 20 "$dir/${build[0]##*/}"
			echo "FAIL  ${build[*]}, its last lines are above"
		done <"$dir/failed"
		failed=1
	fi
	exit $failed
} | bin/testsum -beside "$dir" "${test[@]}"
