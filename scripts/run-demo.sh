#!/usr/bin/env bash
# Serves the demo disk on loopback, in the foreground, and prints how to log in. Ctrl-C ends it. The
# daemon's variables work here, too: LISTEN or PORT, METRICS_LISTEN, WORK_DIR and READY_FILE.
# CHAP_USERNAME and CHAP_PASSWORD turn CHAP on. METRICS_PORT sets only the port of the pages.
set -euo pipefail

[ $# = 1 ] || {
	echo "usage: $0 BINARY" >&2
	exit 2
}
binary=$(realpath "$1")
cd "$(dirname "$0")/.."

# reachable ADDRESS PORT: prints how a client on this machine reaches the daemon's listen ADDRESS.
# PORT is the default port.
reachable() {
	local host=$1 port=$2
	case $1 in
	*\]:* | *.*:* | localhost:* | :[0-9]*)
		host=${1%:*}
		port=${1##*:}
		;;
	esac
	host=${host#[}
	host=${host%]}
	case $host in
	'' | 0.0.0.0 | localhost) host=127.0.0.1 ;;
	::) host='[::1]' ;;
	*:*) host="[$host]" ;;
	esac
	# A free port is only in the log.
	[ "$port" != 0 ] || port=PORT
	echo "$host:$port"
}

export LISTEN=${LISTEN:-127.0.0.1}
export METRICS_LISTEN=${METRICS_LISTEN-127.0.0.1:${METRICS_PORT:-9260}}
export WORK_DIR=${WORK_DIR:-$PWD/cache/demo}
export READY_FILE=${READY_FILE-$WORK_DIR/ready}
export DISK_DIR=$PWD/examples/demo/disk
target=${TARGET_NAME:-${WWN:-iqn.2017-01.io.kubevirt:wrapper}}
portal=$(reachable "${LISTEN%%,*}" "${PORT:-3260}")
mkdir -p "$WORK_DIR"

# Desktop sessions set USERNAME. Without a password, that is half a credential.
[ -n "${PASSWORD:-}${PASSWORD_BASE64:-}" ] || unset USERNAME

user=
hint='without a password (set CHAP_USERNAME and CHAP_PASSWORD to require one)'
if [ -n "${CHAP_USERNAME:-}" ]; then
	user="$CHAP_USERNAME@"
	hint='with CHAP: let the clients read the password from LIBISCSI_CHAP_PASSWORD'
fi
pages='off, because METRICS_LISTEN is empty'
[ -z "$METRICS_LISTEN" ] || pages="http://$(reachable "$METRICS_LISTEN" 9260)/"

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

Page, status and metrics: $pages

EOF

exec "$binary" serve
