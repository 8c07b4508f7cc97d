#!/usr/bin/env bash
# Unpacks the clients of the Debian releases of scripts/generations: QEMU, libvirt, libnbd, libiscsi,
# nbdkit, fio. Nothing is installed, and it needs no root. The first time takes about a minute. Prints
# the directory; RELEASE/bin in it has a program for each client, and RELEASE/root is the release's
# own tree. The tests of a room of integration run with a release so:
#
#   KUBEVIRT_DISK_GENERATION=$(scripts/build-clients.sh)/trixie go test ./integration/nbd
#
# It is cache/clients/HASH, HASH being that of this script. KUBEVIRT_DISK_CLIENTS names another place
# than cache/clients, which several checkouts can share.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=qemu-utils,qemu-block-extra,qemu-system-x86,libnbd-bin,python3-libnbd,libiscsi-bin,nbdkit,fio,libc-bin
packages+=,libvirt-daemon,libvirt-daemon-driver-qemu,libvirt-daemon-driver-secret,libvirt-clients,libxml2-utils
packages+=,util-linux,mount,dash,bash,coreutils,sed,grep # for what runs in the whole of a release
programs=(qemu-img qemu-io qemu-nbd qemu-storage-daemon qemu-system-x86_64 nbdinfo nbdcopy nbdsh nbdkit fio virsh
	iscsi-ls iscsi-inq iscsi-perf iscsi-readcapacity16 iscsi-test-cu)

# Later in integration/internal/rig/generations.go computes the same.
hash=$(sha256sum <scripts/build-clients.sh | cut -c 1-16)
out=${KUBEVIRT_DISK_CLIENTS:-$PWD/cache/clients}/$hash
mkdir -p "$out"
exec 9>"$out/lock" # two at once would unpack everything twice
flock 9

# unpack RELEASE makes its root and its programs.
unpack() {
	local release=$1 dir=$out/$1.new program mode=root
	rm -rf "$dir"
	mkdir "$dir" "$dir/bin"
	[ "$(id -u)" = 0 ] || mode=unshare
	mmdebstrap --quiet --mode=$mode --variant=extract --include="$packages" \
		--aptopt='Acquire::Retries "3"' "$release" "$dir/root" "$(scripts/debian-mirror.sh)"
	for program in "${programs[@]}"; do
		[ -e "$dir/root/usr/bin/$program" ] || [ -e "$dir/root/usr/sbin/$program" ] || {
			echo "build-clients: Debian $release has no $program" >&2
			exit 1
		}
		# Each program runs with the loader and the libraries of its own release.
		cat >"$dir/bin/$program" <<'EOT'
#!/bin/sh
root=$(dirname "$(realpath "$0")")/../root
lib=$(echo "$root"/usr/lib/*-linux-gnu)
name=$(basename "$0")
program=$root/usr/bin/$name
[ -e "$program" ] || program=$root/usr/sbin/$name
export QEMU_MODULE_DIR="$lib/qemu"
case $name in
qemu-system-*) set -- -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" "$@" ;; # firmware
nbdkit) # it looks for its parts where the other release has its own
	plugin=
	for arg; do
		shift
		case $arg in
		--filter=*) arg=--filter=$lib/nbdkit/filters/nbdkit-${arg#*=}-filter.so ;;
		-*) ;;
		*) [ -n "$plugin" ] || plugin=$arg arg=$lib/nbdkit/plugins/nbdkit-$arg-plugin.so ;;
		esac
		set -- "$@" "$arg"
	done
	;;
nbdsh) # a script that runs this
	program=$root/usr/bin/python3
	set -- -m nbd "$@"
	export PYTHONHOME="$root/usr"
	;;
esac
exec "$lib"/ld-linux-*.so.? --argv0 "$name" --library-path "$lib:$lib/ceph" "$program" "$@"
EOT
		chmod +x "$dir/bin/$program"
	done
	mv "$dir" "$out/$release"
}

mapfile -t releases < <(grep -v '^#' scripts/generations)
for release in "${releases[@]}"; do
	if [ -e "$out/$release" ]; then
		continue
	fi
	if ! command -v mmdebstrap >/dev/null; then
		echo "build-clients: not unpacked, for want of mmdebstrap" >&2
		[ "${KUBEVIRT_DISK_REQUIRE_TOOLS:-}" != 1 ]
		exit
	fi
	echo "build-clients: unpacking the clients of Debian $release" >&2
	unpack "$release"
done
echo "$out"
