#!/usr/bin/env bash
# Runs every fuzz test of the module for FUZZTIME, one after the other, because `go test -fuzz`
# takes one at a time. Arguments are packages; the default is all of them. Minimizing is limited:
# otherwise it can take all the time of a short run.
set -euo pipefail
cd "$(dirname "$0")/.."

go=${GO:-go}
fuzztime=${FUZZTIME:-60s}
[ $# -gt 0 ] || set -- ./...

# Build only the packages with a fuzz test: `go test -list` alone would link all test binaries.
mapfile -t packages < <("$go" list -f '{{.ImportPath}} {{.Dir}}' "$@" | while read -r package dir; do
	if grep -qs '^func Fuzz' "$dir"/*_test.go; then
		echo "$package"
	fi
done)

# fuzz PACKAGE NAME: on a machine short of processors, the go command may report the end of the time
# as a failure, and prints nothing else. Such a run found nothing and is repeated. A run that found
# something names the input.
fuzz() {
	local try
	for try in 1 2 3; do
		if out=$("$go" test -run '^$' -fuzz "^$2\$" -fuzztime "$fuzztime" -fuzzminimizetime 20x "$1" 2>&1); then
			return 0
		fi
		if ! grep -q '^ *context deadline exceeded$' <<<"$out" || grep -q -e 'Failing input' -e 'panic:' -e '_test.go:' <<<"$out"; then
			return 1
		fi
		echo "fuzz: $2 failed only because its time ended, try $try"
	done
	return 1
}

count=0
failed=()
for package in "${packages[@]}"; do
	while read -r name; do
		count=$((count + 1))
		if fuzz "$package" "$name"; then
			printf 'fuzz: %s %s ok\n' "${package#kubevirt.io/disk/}" "$name"
		else
			failed+=("$package $name")
			printf '%s\n' "$out"
		fi
	done < <("$go" test -list '^Fuzz' "$package" | grep '^Fuzz')
done

echo "fuzz: $count fuzz tests, $fuzztime each, ${#failed[@]} failed"
if [ ${#failed[@]} -gt 0 ]; then
	printf 'fuzz: failed: %s\n' "${failed[@]}" >&2
	exit 1
fi
