#!/usr/bin/env bash
# Backs up a disk whose guest goes on, in two ways, restores it from both, and compares every byte.
# Each run after the first one copies only what has changed since the last one:
#
#   DIRECTORY/disk.raw    a raw copy, by nbdcopy, and then by incremental-backup.py
#   REPOSITORY:SNAPSHOT   an image in a registry, by commit: a layer on the image of the last run
#
#   backup.sh DISK IMAGE REPOSITORY DIRECTORY
#
# DISK is a name or a LUN, IMAGE what it was made of, in a registry. The daemon serves the disk by
# NBD at the socket NBD_SOCKET. The other settings are those of kubevirt-disk: WORK_DIR or
# CONTROL_SOCKET, REGISTRY_CONFIG and others. It needs nbdcopy and python3-libnbd.
set -euo pipefail
[ $# -eq 4 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
disk=$1 image=$2 repository=$3 directory=$4
here=$(dirname "$0")
: "${NBD_SOCKET:?is the socket of --nbd unix:PATH}"
[ -d "$directory" ] || { echo "there is no directory $directory: make it, or mount it" >&2; exit 2; }

now=backup-$(date -u +%Y%m%dT%H%M%S%N)
last=
[ ! -e "$directory/last" ] || last=$(cat "$directory/last")
if [ -n "$last" ] && ! kubevirt-disk snapshot list "$disk" | grep -wF -- "$last" >/dev/null; then # -q would not read all
  echo "the snapshot $last of the last run is gone: all is copied again" >&2
  last=
fi

# A point in time. For one that a database likes, freeze the guest: see --before and --after.
kubevirt-disk snapshot create "$disk" "$now"
restored=$(mktemp -d) kept=
# shellcheck disable=SC2317 # it is called at the end
finish() {
  status=$?
  rm -rf "$restored"
  kubevirt-disk snapshot unserve "$disk" "$now" >/dev/null 2>&1 || true
  # Without it the next run goes on from the last one that went well.
  [ -n "$kept" ] || kubevirt-disk snapshot delete "$disk" "$now" || true
  exit $status
}
trap finish EXIT

# The raw copy. It is replaced when it is complete, so that there is always one.
served=$(kubevirt-disk snapshot serve "$disk" "$now")
export=${served##* as \"} export=${export%\"}
export=${export//%/%25} export=${export//\#/%23} export=${export//\?/%3F}
uri="nbd+unix:///$export?socket=$NBD_SOCKET"
if [ -n "$last" ]; then
  cp --sparse=always --reflink=auto "$directory/disk.raw" "$directory/new.raw"
  /usr/bin/python3 "$here/incremental-backup.py" "$uri" "$last" "$directory/new.raw"
else
  nbdcopy --flush "$uri" "$directory/new.raw"
fi

# The image. A chain of versions that gets too long is made short again.
onto=${last:+$repository:$last}
kubevirt-disk commit "$disk@$now" "$repository:$now" --onto "${onto:-$image}" ||
  kubevirt-disk commit "$disk@$now" "$repository:$now" --onto "${onto:-$image}" --squash

# What is restored is what the guest had at that time.
nbdcopy "$uri" "$restored/guest.raw"
cmp "$restored/guest.raw" "$directory/new.raw"
kubevirt-disk pull "$repository:$now" "$restored/image.raw"
cmp "$restored/guest.raw" "$restored/image.raw"

mv "$directory/new.raw" "$directory/disk.raw"
echo "$now" >"$directory/last.new"
mv "$directory/last.new" "$directory/last"
kept=yes # whatever comes now, the next run goes on from this one
[ -z "$last" ] || kubevirt-disk snapshot delete "$disk" "$last" ||
  echo "the snapshot $last is not needed any more, and could not be deleted" >&2
echo "backed up as $repository:$now"
