#!/usr/bin/env bash
# Builds what the tests with KubeVirt run, from a module in integration: KubeVirt's virt-launcher,
# which has our binary as its hook sidecar, and a program with KubeVirt's clients. A binary that is
# there is not built again. Prints the directory.
#
#   build-launcher.sh [launcher | launcher19]
#
# The first is KubeVirt 1.7.0, the second 1.9.0. The directory is cache/launcher/HASH, HASH being
# that of the module and of this script. KUBEVIRT_DISK_LAUNCHER names another place than
# cache/launcher, which several checkouts can share. It needs a C compiler and Debian's libvirt-dev.
set -euo pipefail
cd "$(dirname "$0")/.."

go=${GO:-go}
module=$PWD/integration/${1:-launcher}
# programsOf in integration/kubevirt/pod_test.go computes the same.
hash=$(cat "$module"/{go.mod,go.sum,client/main.go} scripts/build-launcher.sh | sha256sum | cut -c 1-16)
out=${KUBEVIRT_DISK_LAUNCHER:-$PWD/cache/launcher}/$hash
mkdir -p "$out"
exec 9>"$out/lock" # two at once would build everything twice
flock 9

# build NAME PACKAGE: without optimizations, because the compiler takes far longer than what it saves.
build() {
	local name=$1 package=$2 try
	[ ! -x "$out/$name" ] || return 0
	echo "build-launcher: $name" >&2
	for try in 1 2 3; do # a module proxy may fail
		if "$go" build -C "$module" -trimpath -gcflags 'all=-N -l -dwarf=false' -ldflags '-s -w' -o "$out/$name.new" "$package"; then
			mv "$out/$name.new" "$out/$name"
			return
		fi
		echo "build-launcher: $name failed, try $try of 3" >&2
		sleep 2
	done
	return 1
}

if [ ! -x "$out/virt-launcher" ] && ! { pkg-config --exists libvirt && command -v "${CC:-gcc}"; } >/dev/null 2>&1; then
	echo "build-launcher: not built, for want of a C compiler, pkgconf or libvirt-dev" >&2
	[ "${KUBEVIRT_DISK_REQUIRE_TOOLS:-}" != 1 ]
	exit
fi
export CGO_ENABLED=1
build client ./client
build virt-launcher kubevirt.io/kubevirt/cmd/virt-launcher
echo "$out"
