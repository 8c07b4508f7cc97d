#!/usr/bin/env bash
# Serves the demo disk on loopback in the foreground and says how to log in. Ctrl-C ends it.
# PORT and METRICS_PORT choose other ports than 3260 and 9260; a CHAP_USERNAME and CHAP_PASSWORD of the environment turn CHAP on.
set -euo pipefail

[ $# = 1 ] || {
	echo "usage: $0 BINARY" >&2
	exit 2
}
binary=$(realpath "$1")
cd "$(dirname "$0")/.."

port=${PORT:-3260}
metrics_port=${METRICS_PORT:-9260}
target=${TARGET_NAME:-iqn.2017-01.io.kubevirt:wrapper}
state=$PWD/cache/demo
mkdir -p "$state"

# Desktop sessions set it, and without a password it would be half a credential.
[ -n "${PASSWORD:-}${PASSWORD_BASE64:-}" ] || unset USERNAME

user=
hint='without a password, as it listens on this machine only'
if [ -n "${CHAP_USERNAME:-}" ]; then
	user="$CHAP_USERNAME@"
	hint='with CHAP: let the clients read the password from LIBISCSI_CHAP_PASSWORD'
fi
portal=127.0.0.1:$port

cat <<EOF
Serving examples/demo/disk as $target, $hint.
Log in from another terminal:

  iscsi-ls -s iscsi://$user$portal
  qemu-io -r -f raw -c 'read -v 0 512' iscsi://$user$portal/$target/1
  qemu-img convert -O raw iscsi://$user$portal/$target/1 demo.raw

As a disk of this machine (root, package open-iscsi):

  iscsiadm -m discovery -t sendtargets -p $portal
  iscsiadm -m node -T $target -p $portal --login
  mount -o ro /dev/disk/by-path/ip-$portal-iscsi-$target-lun-1 /mnt && cat /mnt/README.txt
  umount /mnt && iscsiadm -m node -T $target -p $portal --logout

State and metrics: curl http://127.0.0.1:$metrics_port/status

EOF

export DISK_DIR=$PWD/examples/demo/disk
export WORK_DIR=$state
export READY_FILE=$state/ready
export LISTEN=$portal
export METRICS_LISTEN=127.0.0.1:$metrics_port
export TARGET_NAME=$target
unset PORT
exec "$binary" serve
