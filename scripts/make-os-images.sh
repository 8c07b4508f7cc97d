#!/usr/bin/env bash
# Makes disk images with a real operating system for benchmarks: a Debian root file system on ext4,
# made by debootstrap, with more than 1 GiB of data in 10 GiB. There is a plain, a zlib and a zstd
# qcow2, and the zlib one again with a virtual size of 100 GiB. Existing images are kept. With
# "tenfold", or some of "plain-tenfold", "zlib-tenfold" and "zstd-tenfold", it also makes images
# with ten times the data: the 10 GiB ten times in a row, in 100 GiB. These take 35 GiB of disk
# together, and compressing them takes minutes.
#
# Usage: make-os-images.sh DIRECTORY [TENFOLD...] (as root, with debootstrap, e2fsprogs and
# qemu-utils)
set -euo pipefail

dir=${1:?usage: make-os-images.sh DIRECTORY [TENFOLD...]}
shift
large=()
for name; do
	case $name in
	tenfold) large+=(plain-tenfold zlib-tenfold zstd-tenfold) ;;
	plain-tenfold | zlib-tenfold | zstd-tenfold) large+=("$name") ;;
	*) echo "make-os-images: $name is none of tenfold, plain-tenfold, zlib-tenfold and zstd-tenfold" >&2; exit 2 ;;
	esac
done
mirror=$("$(dirname "$0")/debian-mirror.sh")
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
make_image() { # make_image NAME COPIES OPTION...: COPIES plain images in a row
	local name=$1 copies=$2 i sources=()
	shift 2
	[ -e "$dir/$name.qcow2" ] && return
	for ((i = 0; i < copies; i++)); do
		sources+=("$dir/plain.qcow2")
	done
	qemu-img convert -f qcow2 -O qcow2 "$@" "${sources[@]}" "$dir/$name.new" || { rm -f "$dir/$name.new"; exit 1; }
	mv "$dir/$name.new" "$dir/$name.qcow2"
}
zlib=(-c)
zstd=(-c -o compression_type=zstd)
make_image zlib 1 "${zlib[@]}"
make_image zstd 1 "${zstd[@]}"
# Ten times as large, but only in its metadata.
if [ ! -e "$dir/zlib-100g.qcow2" ]; then
	cp "$dir/zlib.qcow2" "$dir/large.new"
	qemu-img resize -q "$dir/large.new" 100G
	mv "$dir/large.new" "$dir/zlib-100g.qcow2"
fi
# Ten times the data. All sources are the same file, so nothing else has to be stored. The order of
# the clusters does not matter here, so -W may write them out of order and compress in parallel.
for name in "${large[@]}"; do
	options=(-m 16 -W)
	case $name in
	zlib-*) options+=("${zlib[@]}") ;;
	zstd-*) options+=("${zstd[@]}") ;;
	esac
	make_image "$name" 10 "${options[@]}"
done
