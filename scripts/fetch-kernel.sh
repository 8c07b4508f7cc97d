#!/usr/bin/env bash
# Fetches Debian's kernel for virtual machines and unpacks it. It installs nothing and needs no
# root. DIRECTORY/ARCH/root is the tree. DIRECTORY/ARCH/source names the source package and its
# version, which anybody who distributes the kernel has to offer (GPL-2).
#
# Usage: fetch-kernel.sh [--update] [--any] ARCH DIRECTORY, with ARCH amd64 or arm64. It takes the
# latest kernel of the release and of its security updates, and refuses one that is older than the
# one below. An existing kernel stays if it is not older; with --update, a later one is looked for.
# With --any, every kernel will do, and security updates that cannot be reached are only warned of.
#
# It needs apt and dpkg. DEBIAN_MIRROR and DEBIAN_SECURITY_MIRROR name other mirrors, such as a day of
# snapshot.debian.org, and DEBIAN_KEYRING the keys that they are signed with.
set -euo pipefail

least=6.1.192-2 # of the package linux-image-*-cloud-*: the oldest one that was tested
suite=bookworm
mirror=$("$(dirname "$0")/debian-mirror.sh")
security=$("$(dirname "$0")/debian-mirror.sh" security)
keyring=${DEBIAN_KEYRING:-/usr/share/keyrings/debian-archive-keyring.gpg}

any=""
update=""
while [[ ${1:-} == --* ]]; do
	case $1 in
	--any) any=yes ;;
	--update) update=yes ;;
	*) break ;;
	esac
	shift
done
if [ $# != 2 ] || [[ $1 != amd64 && $1 != arm64 ]]; then
	echo "usage: $0 [--update] [--any] amd64|arm64 DIRECTORY" >&2
	exit 2
fi
arch=$1
mkdir -p "$2"
dir=$(cd "$2" && pwd)

fail() {
	echo "fetch-kernel: $*" >&2
	exit 1
}

not_older() { dpkg --compare-versions "$1" ge "$2"; }

exec 9>"$dir/.lock"
flock 9
# existing is the version of the kernel that is there.
existing=$(sed -nE '1s/.*, version ([^ ,]+),.*/\1/p' "$dir/$arch/source" 2>/dev/null || true)
for tool in apt-get apt-cache dpkg dpkg-deb; do
	command -v "$tool" >/dev/null || fail "$tool is not installed: Debian's kernel is unpacked with it"
done
[ -e "$keyring" ] || fail "$keyring is missing: install the package debian-archive-keyring"
# A kernel of an older form of the file "source" counts as none.
if [ -n "$existing" ] && [ -z "$update" ] && { [ -n "$any" ] || not_older "$existing" "$least"; }; then
	exit 0
fi
work=$(mktemp -d "$dir/.new-XXXXXX")
trap 'rm -rf "$work"' EXIT

# Apt works in a directory of its own, with lists for this architecture, and does not touch the
# machine's lists. It uses the machine's proxies.
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/etc"
release="deb [signed-by=$keyring] $mirror $suite main"
updates="deb [signed-by=$keyring] $security $suite-security main"
: >"$work/status"
apt=(-q -o "APT::Architecture=$arch" -o "APT::Architectures=$arch" -o APT::Sandbox::User=root
	-o "Dir::State::lists=$work/lists" -o "Dir::State::status=$work/status"
	-o "Dir::Cache=$work/cache" -o "Dir::Etc::sourcelist=$work/etc/sources.list"
	-o "Dir::Etc::sourceparts=$work/etc" -o Acquire::Retries=3 -o Acquire::Languages=none)
case $mirror$security in
*snapshot.debian.org*) apt+=(-o Acquire::Check-Valid-Until=false) ;; # it was valid on that day
esac
# lists LINE...: reads the lists of these sources.
lists() {
	printf '%s\n' "$@" >"$work/etc/sources.list"
	apt-get "${apt[@]}" update --error-on=any >"$work/log" 2>&1
}
if ! lists "$release" "$updates"; then
	said=$(tail -n 3 "$work/log")
	[ -n "$any" ] || fail "apt-get update: $said"
	echo "fetch-kernel: no security updates, because $security cannot be read: $said" >&2
	lists "$release" || fail "apt-get update: $(tail -n 3 "$work/log")"
fi

# The meta package depends on the current kernel. Every suite has one.
name=$(apt-cache "${apt[@]}" depends "linux-image-cloud-$arch" |
	sed -nE 's/.*Depends: (linux-image-[0-9].*)/\1/p' | head -n 1)
[ -n "$name" ] || fail "$mirror has no package linux-image-cloud-$arch in $suite"
found=$(apt-cache "${apt[@]}" show "$name" | sed -n 's/^Version: //p' | head -n 1)
if ! not_older "$found" "$least"; then
	[ -n "$any" ] || fail "Debian's kernel is $found at $mirror and $security, which is older than $least: name mirrors that are up to date with DEBIAN_MIRROR and DEBIAN_SECURITY_MIRROR"
	echo "fetch-kernel: taking $found, which is older than $least" >&2
fi
if [ -n "$existing" ] && not_older "$existing" "$found"; then
	exit 0
fi
(cd "$work" && apt-get "${apt[@]}" download "$name=$found" >"$work/log" 2>&1) ||
	fail "apt-get download $name: $(tail -n 3 "$work/log")"
deb=("$work"/*.deb)
mkdir "$work/$arch"
dpkg-deb -x "${deb[0]}" "$work/$arch/root"
# The signed kernel is built from the source package "linux" of the same version.
cat >"$work/$arch/source" <<EOT
The kernel is that of Debian's package $name, version $found, unchanged. Its source package is
"linux", version $found, of Debian $suite or its security updates: https://snapshot.debian.org/package/linux/$found/
EOT
rm -rf "${dir:?}/$arch"
mv "$work/$arch" "$dir/$arch"
