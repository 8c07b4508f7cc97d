#!/usr/bin/env bash
# Runs gofmt, the width of Go and Markdown, go vet, staticcheck and shellcheck over the whole tree; any finding fails.
# MODULES are the directories of the modules that go vet and staticcheck look at: '. kubernetes' by default.
set -euo pipefail
cd "$(dirname "$0")/.."

go=${GO:-go} modules=${MODULES:-. kubernetes}
failed=0
found() {
	echo "lint: $1 found something" >&2
	failed=1
}

unformatted=$(git ls-files --cached --others --exclude-standard '*.go' | xargs -r gofmt -l) || found gofmt
if [ -n "$unformatted" ]; then
	echo "$unformatted"
	found gofmt
fi

git ls-files -z --cached --others --exclude-standard '*.go' | xargs -0 -r "$go" run ./scripts/gowidth ||
	found 'the width of Go (at most 100 columns)'

# With C.UTF-8, grep counts characters, not bytes. Tables and code count, too.
mapfile -d '' -t pages < <(git ls-files -z --cached --others --exclude-standard '*.md')
if LC_ALL=C.UTF-8 grep -nHE '^.{121}' "${pages[@]}"; then
	found 'the width of Markdown (at most 120 columns)'
fi

# What is built does not belong into the repository, and neither does what is big.
files() { git ls-files -z --cached --others --exclude-standard; }
programs=$(files | LC_ALL=C xargs -0 -r grep -lsP '^\x7fELF' || true)
large=$(files | xargs -0 -r stat -c '%s %n' 2>/dev/null | awk '$1 > 262144')
if [ -n "$programs$large" ]; then
	echo "$programs$large"
	found 'programs, or files of over 256 KiB, in the repository'
fi

if command -v protoc >/dev/null; then
	scripts/generate-proto.sh --check || found 'generated code that is not fresh'
elif [ "${KUBEVIRT_DISK_REQUIRE_TOOLS:-}" = 1 ]; then
	echo "lint: protoc is not installed" >&2
	failed=1
fi

# fetch loads what the go command needs into its cache. It retries, because a module proxy may fail.
fetch() {
	local try
	for try in 1 2 3; do
		if "$@" >/dev/null; then
			return
		fi
		echo "lint: $* failed, try $try of 3" >&2
		sleep 2
	done
	return 1
}
staticcheck=honnef.co/go/tools/cmd/staticcheck@v0.8.2
fetch "$go" run "$staticcheck" -version
for module in $modules; do
	fetch "$go" list -C "$module" -deps -test ./...
	"$go" vet -C "$module" ./... || found "go vet in $module"
	# staticcheck is no dependency of either module: the version is that of the command.
	(cd "$module" && "$go" run "$staticcheck" ./...) || found "staticcheck in $module"
done

if command -v shellcheck >/dev/null; then
	mapfile -t shell < <(git ls-files --cached --others --exclude-standard | while read -r file; do
		if [ -f "$file" ] && head -c 64 "$file" | grep -aqE '^#!.*\b(ba)?sh\b'; then
			echo "$file"
		fi
	done)
	shellcheck "${shell[@]}" || found shellcheck
elif [ "${KUBEVIRT_DISK_REQUIRE_TOOLS:-}" = 1 ]; then
	echo "lint: shellcheck is not installed" >&2
	failed=1
else
	echo "lint: shellcheck is not installed, so scripts were not checked" >&2
fi
exit $failed
