#!/usr/bin/env bash
# Unpacks the clients of a later Debian than the one that runs the tests, so that they are tested with
# both generations: QEMU, libnbd, libiscsi, nbdkit. Nothing is installed, and it needs no root. The
# first time takes about a minute. Prints the directory; its bin has a program for each client.
#
# It is cache/clients/HASH, HASH being that of this script. KUBEVIRT_DISK_CLIENTS names another place
# than cache/clients, which several checkouts can share.
set -euo pipefail
cd "$(dirname "$0")/.."

suite=trixie # Debian 13: QEMU 10.0, libnbd 1.22, libiscsi 1.20, nbdkit 1.42
packages=qemu-utils,qemu-block-extra,libnbd-bin,python3-libnbd,libiscsi-bin,nbdkit,libc-bin,qemu-system-x86
programs=(qemu-img qemu-io qemu-nbd qemu-storage-daemon nbdinfo nbdcopy nbdkit iscsi-ls iscsi-inq iscsi-perf iscsi-test-cu
	qemu-system-x86_64)

# Later in integration/internal/rig/generations.go computes the same.
hash=$(sha256sum <scripts/build-clients.sh | cut -c 1-16)
out=${KUBEVIRT_DISK_CLIENTS:-$PWD/cache/clients}/$hash
mkdir -p "$out"
exec 9>"$out/lock" # two at once would unpack everything twice
flock 9
if [ -e "$out/bin" ]; then
	echo "$out"
	exit
fi
if ! command -v mmdebstrap >/dev/null; then
	echo "build-clients: not unpacked, for want of mmdebstrap" >&2
	[ "${KUBEVIRT_DISK_REQUIRE_TOOLS:-}" != 1 ]
	exit
fi
echo "build-clients: unpacking the clients of Debian $suite" >&2
rm -rf "$out"/root "$out"/new
mode=root
[ "$(id -u)" = 0 ] || mode=unshare
mmdebstrap --quiet --mode=$mode --variant=extract --include="$packages" \
	--aptopt='Acquire::Retries "3"' "$suite" "$out/root" "$(scripts/debian-mirror.sh)"

# Each program runs with the loader and the libraries of its own release.
mkdir "$out/new"
for program in "${programs[@]}"; do
	[ -e "$out/root/usr/bin/$program" ] || [ -e "$out/root/usr/sbin/$program" ] || {
		echo "build-clients: Debian $suite has no $program" >&2
		exit 1
	}
	cat >"$out/new/$program" <<'EOT'
#!/bin/sh
root=$(dirname "$(realpath "$0")")/../root
lib=$(echo "$root"/usr/lib/*-linux-gnu)
name=$(basename "$0")
program=$root/usr/bin/$name
[ -e "$program" ] || program=$root/usr/sbin/$name
export QEMU_MODULE_DIR="$lib/qemu"
case $name in
qemu-system-*) set -- -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" "$@" ;; # firmware
esac
exec "$lib"/ld-linux-*.so.? --argv0 "$name" --library-path "$lib:$lib/ceph" "$program" "$@"
EOT
	chmod +x "$out/new/$program"
done
mv "$out/new" "$out/bin"
echo "$out"
