#!/usr/bin/env bash
# Runs every fuzz test of the module for FUZZTIME, one after the other: `go test -fuzz` takes one at a time.
# Arguments are packages; the default is all of them. Without a limit, making an interesting input smaller may take the
# whole time of a short run.
set -euo pipefail
cd "$(dirname "$0")/.."

go=${GO:-go}
fuzztime=${FUZZTIME:-60s}
[ $# -gt 0 ] || set -- ./...

# Only packages with a fuzz test are built; `go test -list` alone would link all test binaries.
mapfile -t packages < <("$go" list -f '{{.ImportPath}} {{.Dir}}' "$@" | while read -r package dir; do
	if grep -qs '^func Fuzz' "$dir"/*_test.go; then
		echo "$package"
	fi
done)

# fuzz PACKAGE NAME: the go command may take the end of the time itself for a failure, on a machine that is short of processors: it
# then says no more than that. Such a run found nothing and is made again; one that found something names the input.
fuzz() {
	local try
	for try in 1 2 3; do
		if out=$("$go" test -run '^$' -fuzz "^$2\$" -fuzztime "$fuzztime" -fuzzminimizetime 20x "$1" 2>&1); then
			return 0
		fi
		if ! grep -q '^ *context deadline exceeded$' <<<"$out" || grep -q -e 'Failing input' -e 'panic:' -e '_test.go:' <<<"$out"; then
			return 1
		fi
		echo "fuzz: $2 ran into the end of its time, try $try"
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
