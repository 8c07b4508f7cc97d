#!/usr/bin/env bash
# Makes disk/demo.qcow2: a 32 MiB disk with an ext2 file system. Its README.txt says what it is. The
# first sector, which ext2 leaves free, has a greeting as text, so that the disk can be recognised
# without mounting it. Identifiers and times are fixed, so the same tools make the same bytes again.
# Needs mke2fs and qemu-img, but not root.
set -euo pipefail
cd "$(dirname "$0")"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
PATH=$PATH:/usr/sbin:/sbin
export E2FSPROGS_FAKE_TIME=1483228800 # 2017-01-01
export TZ=UTC

mkdir "$work/files" "$work/files/notes"
cat >"$work/files/README.txt" <<'EOF'
Hello from kubevirt-disk.

You are reading a file on a disk that travelled as demo.qcow2 in an image
directory and reached you as an iSCSI LUN. Write to it as you like: your
writes go to an expanded copy, never to the image.
EOF
for number in 1 2 3; do
	seq -f "Note $number, line %02g: the quick brown fox jumps over the lazy dog." 40 >"$work/files/notes/note-$number.txt"
done
find "$work/files" -exec touch -d @$E2FSPROGS_FAKE_TIME {} +

truncate -s 32M "$work/demo.raw"
mke2fs -q -t ext2 -b 4096 -m 0 -N 64 -L kubevirt-demo \
	-U 6b756265-7669-7274-2d64-69736b000001 -E hash_seed=6b756265-7669-7274-2d64-69736b000002,root_owner=0:0 \
	-O ^resize_inode,^dir_index -d "$work/files" "$work/demo.raw"
printf 'kubevirt-disk demo: this text is the first sector of examples/demo/disk/demo.qcow2\n' |
	dd of="$work/demo.raw" conv=notrunc status=none

mkdir -p disk
qemu-img convert -c -O qcow2 -o cluster_size=4096,compression_type=zlib "$work/demo.raw" "$work/demo.qcow2"
mv "$work/demo.qcow2" disk/demo.qcow2
qemu-img info disk/demo.qcow2
