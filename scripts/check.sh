#!/usr/bin/env bash
# The everyday loop: lint, and the tests of the packages that changed since a commit and of those that
# import them, without the race detector. The default is all uncommitted changes; if everything is
# committed, the last commit. BASE=main checks all commits of a branch. Prints the packages that it
# leaves out; `make test` tests them, too.
set -euo pipefail
cd "$(dirname "$0")/.."

go=${GO:-go}
base=${BASE:-HEAD}

# changed prints the directories of the packages with changed files. A file that is not Go, such as
# test data, belongs to the next package above it.
changed() {
	local dir
	{
		git diff --name-only "$1"
		git ls-files --others --exclude-standard
	} | while read -r file; do
		dir=$file
		while [[ $dir == */* ]]; do
			dir=${dir%/*}
			if compgen -G "$dir/*.go" >/dev/null; then
				echo "./$dir"
				break
			fi
		done
	done | sort -u
}
mapfile -t packages < <(changed "$base")
if [ ${#packages[@]} = 0 ] && [ "$base" = HEAD ]; then
	mapfile -t packages < <(changed HEAD~1)
fi
if [ ${#packages[@]} = 0 ]; then
	scripts/lint.sh
	echo "check: no Go package has changed"
	exit 0
fi
# affected prints the packages of a module that changed, and those that import one, directly or not,
# themselves or by their tests.
affected() ( # affected MODULE DIRECTORY...
	cd "$1"
	shift
	"$go" list -e -test -f '{{or .ForTest .ImportPath}} {{.ImportPath}} {{join .Deps " "}}' ./... |
		awk -v changed="$("$go" list -e "$@" | tr '\n' ' ')" '
			BEGIN { n = split(changed, c, " "); for (i = 1; i <= n; i++) is[c[i]] = 1 }
			{
				sub(/\.test$/, "", $1)
				for (i = 2; i <= NF; i++) if ($i in is) { print $1; next }
			}' | sort -u
)

# Who works on disks needs nothing of the module kubernetes: it is tested if it has changed itself.
main=() kubernetes=()
for dir in "${packages[@]}"; do
	case $dir in
	./kubernetes | ./kubernetes/*) kubernetes+=(".${dir#./kubernetes}") ;;
	*) main+=("$dir") ;;
	esac
done
[ ${#main[@]} = 0 ] || modules=.
[ ${#kubernetes[@]} = 0 ] || modules+=' kubernetes'
export MODULES=${modules# }

# check tests a module, and lints beside that, once.
beside=scripts/lint.sh
check() { # check MODULE DIRECTORY...
	local module=$1 path package name tested=() left=()
	shift
	[ $# -gt 0 ] || return 0
	path=$("$go" list -C "$module" -m)
	for package in $(affected "$module" "$@"); do
		name=${package#"$path/"}
		# The integration tests take more than a few minutes.
		if [[ $name == integration || $name == integration/* ]]; then
			left+=("$name")
		else
			tested+=("$package")
		fi
	done
	[ ${#left[@]} = 0 ] || echo "check: left out, because they take long: ${left[*]}"
	if [ ${#tested[@]} -gt 0 ]; then
		MODULE=$module RACE=no BESIDE=$beside scripts/test.sh -short "${tested[@]}"
		beside=
	fi
}
check . "${main[@]}"
check kubernetes "${kubernetes[@]}"
[ -z "$beside" ] || "$beside"
