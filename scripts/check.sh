#!/usr/bin/env bash
# The everyday loop: lint, and the tests of the packages that changed since a commit. The default is
# all uncommitted changes; if everything is committed, the last commit. BASE=main checks all commits
# of a branch.
set -euo pipefail
cd "$(dirname "$0")/.."

go=${GO:-go}
base=${BASE:-HEAD}
changed() {
	{
		git diff --name-only --diff-filter=d "$1" -- '*.go'
		git ls-files --others --exclude-standard -- '*.go'
	} | xargs -r -n1 dirname | sort -u | sed 's|^|./|'
}
mapfile -t packages < <(changed "$base")
if [ ${#packages[@]} = 0 ] && [ "$base" = HEAD ]; then
	mapfile -t packages < <(changed HEAD~1)
fi

scripts/lint.sh
if [ ${#packages[@]} = 0 ]; then
	echo "check: no Go package has changed"
	exit 0
fi
# The integration tests take minutes; `make test` runs them.
mapfile -t tested < <("$go" list "${packages[@]}" | grep -v '/integration$')
[ ${#tested[@]} = 0 ] || scripts/test.sh "${tested[@]}"
