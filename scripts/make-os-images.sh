#!/usr/bin/env bash
# Makes disk images with a real operating system in them, for benchmarks: a Debian root file system by debootstrap, ext4, more than
# 1 GiB of data in 10 GiB, as plain, zlib and zstd qcow2, and the same in 100 GiB. They are made once and kept.
# Usage: make-os-images.sh DIRECTORY (as root, with debootstrap, e2fsprogs and qemu-utils)
set -euo pipefail

dir=${1:?usage: make-os-images.sh DIRECTORY}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
suite=bookworm
packages=linux-image-amd64,systemd-sysv,openssh-server,build-essential,python3,git,golang-go,vim,locales

mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
for tool in debootstrap mke2fs qemu-img; do
	command -v "$tool" >/dev/null || { echo "make-os-images: $tool is missing" >&2; exit 1; }
done

root=$dir/root
if [ ! -e "$dir/plain.qcow2" ]; then
	rm -rf "$root"
	debootstrap --variant=minbase --include="$packages" "$suite" "$root" "$mirror" >"$dir/debootstrap.log" 2>&1 ||
		{ tail -n 5 "$dir/debootstrap.log" >&2; exit 1; }
	! mountpoint -q "$root/proc" || umount "$root/proc"
	rm -f "$dir/source.raw"
	truncate -s 10G "$dir/source.raw"
	mke2fs -q -t ext4 -d "$root" "$dir/source.raw"
	rm -rf "$root"
	qemu-img convert -f raw -O qcow2 "$dir/source.raw" "$dir/plain.new"
	mv "$dir/plain.new" "$dir/plain.qcow2"
	rm "$dir/source.raw"
fi
make_image() { # make_image NAME OPTION...: of the plain one
	local name=$1
	shift
	[ -e "$dir/$name.qcow2" ] && return
	qemu-img convert -f qcow2 -O qcow2 "$@" "$dir/plain.qcow2" "$dir/$name.new"
	mv "$dir/$name.new" "$dir/$name.qcow2"
}
make_image zlib -c
make_image zstd -c -o compression_type=zstd
# Ten times as large, in its tables and in its data: ten copies of the file system one after the other.
if [ ! -e "$dir/zlib-100g.qcow2" ]; then
	cp "$dir/zlib.qcow2" "$dir/large.new"
	qemu-img resize -q "$dir/large.new" 100G
	mv "$dir/large.new" "$dir/zlib-100g.qcow2"
fi
