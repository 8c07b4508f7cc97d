#!/usr/bin/env python3
"""Brings the backup of a disk up to date: copies what has changed since a snapshot.

    incremental-backup.py URI SINCE FILE

URI is the export of a later snapshot, such as nbd+unix:///vm1@tuesday?socket=/run/disk/nbd.sock.
FILE is a raw copy of the snapshot SINCE, as nbdcopy or "qemu-img convert" make it, and becomes one
of the later snapshot. It needs python3-libnbd.
"""

import os
import sys

import nbd

PIECE = 4 << 20  # bytes that are read at once


def changed_ranges(disk, since):
    """Lists the ranges of the export that may differ from the snapshot, as (offset, length)."""
    ranges = []
    size, at = disk.get_size(), 0
    while at < size:
        entries = []
        disk.block_status(
            min(size - at, 1 << 30), at, lambda _context, _offset, all, _error: entries.extend(all)
        )
        for length, flags in zip(entries[::2], entries[1::2]):
            if flags & 1:
                ranges.append((at, length))
            at += length
    return ranges


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    uri, since, path = sys.argv[1:]
    context = "qemu:dirty-bitmap:" + since
    disk = nbd.NBD()
    disk.add_meta_context(context)
    disk.connect_uri(uri)
    if not disk.can_meta_context(context):
        sys.exit(f"{uri} does not come from a snapshot {since}: make a full copy")
    copied = 0
    with open(path, "r+b") as backup:
        backup.truncate(disk.get_size())
        for at, length in changed_ranges(disk, since):
            end = at + length
            while at < end:
                piece = disk.pread(min(PIECE, end - at), at)
                backup.seek(at)
                backup.write(piece)
                at += len(piece)
                copied += len(piece)
        backup.flush()
        os.fsync(backup.fileno())
    disk.shutdown()
    print(f"copied {copied} of {os.path.getsize(path)} bytes")


if __name__ == "__main__":
    main()
