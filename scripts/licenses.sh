#!/usr/bin/env bash
# Prints the licences of all that is linked into programs: of this project, of Go, and of each module,
# with their notices. Most of them ask for that where a program is given away.
#
# Usage: licenses.sh MODULE PACKAGE...
#
# MODULE is the directory of the module that has the packages: . or kubernetes.
set -euo pipefail
export LC_ALL=C # the order of the modules and files
cd "$(dirname "$0")/.."

go=${GO:-go}
[ $# -ge 2 ] || {
	echo "usage: $0 MODULE PACKAGE..." >&2
	exit 2
}

# texts NAME DIRECTORY prints the licences and notices that a module has at its root.
texts() {
	local file found=""
	for file in "$2"/*; do
		case ${file##*/} in
		[Ll][Ii][Cc][Ee][Nn][SsCc][Ee]* | [Cc][Oo][Pp][Yy][Ii][Nn][Gg]* | [Nn][Oo][Tt][Ii][Cc][Ee]* | PATENTS)
			[ -f "$file" ] || continue
			found=yes
			printf '==== %s: %s\n\n' "$1" "${file##*/}"
			cat "$file"
			printf '\n\n'
			;;
		esac
	done
	[ -n "$found" ] || {
		echo "licenses: $1 has no licence at its root" >&2
		return 1
	}
}

texts kubevirt.io/disk .
texts "Go" "$("$go" env GOROOT)"
modules=$(GOOS=linux CGO_ENABLED=0 "$go" list -C "$1" -deps \
	-f '{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}} {{.Dir}}{{end}}{{end}}' "${@:2}" |
	grep -v '^kubevirt\.io/disk ' | sort -u)
while read -r path version dir; do
	texts "$path $version" "$dir"
done <<<"$modules"
