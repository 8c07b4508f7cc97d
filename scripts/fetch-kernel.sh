#!/usr/bin/env bash
# Fetches Debian's kernel for virtual machines and unpacks it. It installs nothing and needs no
# root. DIRECTORY/ARCH/root is the tree. DIRECTORY/ARCH/source names the source package and its
# version, which anybody who distributes the kernel has to offer (GPL-2). An existing kernel is not
# fetched again.
#
# Usage: fetch-kernel.sh [--any] ARCH DIRECTORY, with ARCH amd64 or arm64. The version is pinned
# below. Debian's mirrors keep only the latest versions: with --any, the latest one is used if the
# pinned one is gone. It needs apt and dpkg-deb. DEBIAN_MIRROR names another mirror.
set -euo pipefail

version=6.1.176-1 # of the package linux-image-*-cloud-*
suite=bookworm
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

any=
if [ "${1:-}" = --any ]; then
	any=yes
	shift
fi
if [ $# != 2 ] || [[ $1 != amd64 && $1 != arm64 ]]; then
	echo "usage: $0 [--any] amd64|arm64 DIRECTORY" >&2
	exit 2
fi
arch=$1
mkdir -p "$2"
dir=$(cd "$2" && pwd)

fail() {
	echo "fetch-kernel: $*" >&2
	exit 1
}

# is_right reports whether the existing kernel will do.
is_right() {
	[ -e "$dir/$arch/source" ] || return 1
	[ -n "$any" ] || grep -qF "$version" "$dir/$arch/source"
}

exec 9>"$dir/.lock"
flock 9
! is_right || exit 0
for tool in apt-get apt-cache dpkg-deb; do
	command -v "$tool" >/dev/null || fail "$tool is not installed: Debian's kernel is unpacked with it"
done
[ -e "$keyring" ] || fail "$keyring is missing: install the package debian-archive-keyring"
work=$(mktemp -d "$dir/.new-XXXXXX")
trap 'rm -rf "$work"' EXIT

# Apt works in a directory of its own, with lists for this architecture, and does not touch the
# machine's lists. It uses the machine's proxies.
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/etc"
echo "deb [signed-by=$keyring] $mirror $suite main" >"$work/etc/sources.list"
: >"$work/status"
apt=(-q -o "APT::Architecture=$arch" -o "APT::Architectures=$arch" -o APT::Sandbox::User=root
	-o "Dir::State::lists=$work/lists" -o "Dir::State::status=$work/status"
	-o "Dir::Cache=$work/cache" -o "Dir::Etc::sourcelist=$work/etc/sources.list"
	-o "Dir::Etc::sourceparts=$work/etc" -o Acquire::Retries=3 -o Acquire::Languages=none)
apt-get "${apt[@]}" update >"$work/log" 2>&1 || fail "apt-get update: $(tail -n 3 "$work/log")"

# The meta package depends on the current kernel.
name=$(apt-cache "${apt[@]}" depends "linux-image-cloud-$arch" |
	sed -nE 's/.*Depends: (linux-image-[0-9].*)/\1/p' | head -n 1)
[ -n "$name" ] || fail "$mirror has no package linux-image-cloud-$arch in $suite"
found=$(apt-cache "${apt[@]}" show "$name" | sed -n 's/^Version: //p' | head -n 1)
if [ "$found" != "$version" ]; then
	[ -n "$any" ] || fail "Debian's kernel is $found now, and $version is pinned: change the version in $0"
	echo "fetch-kernel: version $version is gone from $mirror, taking $found" >&2
fi
(cd "$work" && apt-get "${apt[@]}" download "$name=$found" >"$work/log" 2>&1) ||
	fail "apt-get download $name: $(tail -n 3 "$work/log")"
deb=("$work"/*.deb)
mkdir "$work/$arch"
dpkg-deb -x "${deb[0]}" "$work/$arch/root"
# The signed kernel is built from the source package "linux" of the same version.
cat >"$work/$arch/source" <<EOT
The kernel is that of Debian's package $name, version $found, unchanged. Its source package is
"linux", version $found, of Debian $suite: https://snapshot.debian.org/package/linux/$found/
EOT
rm -rf "${dir:?}/$arch"
mv "$work/$arch" "$dir/$arch"
