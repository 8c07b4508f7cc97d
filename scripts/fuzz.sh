#!/usr/bin/env bash
# Runs every fuzz test of the module for FUZZTIME, one for each processor at a time. Arguments are
# packages; the default is all of them.
#
# TEST_GOFLAGS are flags with which other tests are compiled anyway. With them, the tests are not
# guided by coverage. That needs everything to be compiled once more, with the standard library, and
# is worth nothing in a second.
set -euo pipefail
cd "$(dirname "$0")/.."

export GO=${GO:-go}
export FUZZTIME=${FUZZTIME:-60s}
[ $# -gt 0 ] || set -- ./...

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
found=$("$GO" env GOCACHE)/fuzz # where `go test -fuzz` keeps the inputs that it finds

# fuzz NAME BINARY DIRECTORY PACKAGE: one fuzz test in one process. Minimizing is limited: otherwise
# it can take all the time of a short run. On a machine short of processors, go test may report the
# end of the time as a failure, and print nothing else. Such a run found nothing and is repeated. A
# run that found something names the input.
fuzz() {
	local try out
	for try in {1..10}; do
		if out=$(cd "$3" && "$2" -test.run '^$' -test.fuzz "^$1\$" -test.fuzztime "$FUZZTIME" \
			-test.fuzzminimizetime 20x -test.parallel 1 -test.fuzzcachedir "$found/$4" 2>&1); then
			echo "fuzz: $4 $1 ok"
			return
		fi
		if ! grep -q '^ *context deadline exceeded$' <<<"$out" ||
			grep -q -e 'Failing input' -e 'panic:' -e '_test.go:' <<<"$out"; then
			break
		fi
		echo "fuzz: $1 failed only because its time ended, try $try"
	done
	printf '%s\nfuzz: %s %s failed\n' "$out" "$4" "$1"
}
export -f fuzz
export found

compile=("$GO" test -c -vet=off)
if [ -n "${TEST_GOFLAGS:-}" ]; then
	export GOFLAGS=$TEST_GOFLAGS
else
	compile+=(-fuzz .)
fi

# Each package is compiled once, while the tests of the packages before it run.
"$GO" list -f '{{.ImportPath}} {{.Dir}}' "$@" | while read -r package path; do
	if grep -qs '^func Fuzz' "$path"/*_test.go; then
		binary=$dir/${package//\//_}
		if "${compile[@]}" -o "$binary" "$package" >&2; then
			(cd "$path" && "$binary" -test.list '^Fuzz') |
				sed -n "s|^Fuzz.*|& $binary $path $package|p"
		else
			echo "Fuzz false $path $package" # counts as a failed test
		fi
	fi
done | xargs -r -L 1 -P "$(nproc)" bash -c 'fuzz "$@"' fuzz | tee "$dir/log"

count=$(grep -cE '^fuzz: [^ ]+ Fuzz[^ ]* (ok|failed)$' "$dir/log" || true)
mapfile -t failed < <(grep -E '^fuzz: [^ ]+ Fuzz[^ ]* failed$' "$dir/log")
echo "fuzz: $count fuzz tests, $FUZZTIME each, ${#failed[@]} failed"
if [ ${#failed[@]} -gt 0 ]; then
	printf '%s\n' "${failed[@]}" >&2
	exit 1
fi
