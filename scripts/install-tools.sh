#!/usr/bin/env bash
# Installs missing clients and tools for the tests, if this is root on Debian or Ubuntu. Elsewhere
# it prints what is missing: tests that need a missing tool skip, or fail if
# KUBEVIRT_DISK_REQUIRE_TOOLS=1.
set -euo pipefail

missing=()
need() { # need PACKAGE TEST...: if the test fails, PACKAGE is missing
	local package=$1
	shift
	"$@" >/dev/null 2>&1 || missing+=("$package")
}
has() { PATH=$PATH:/usr/sbin:/sbin command -v "$1"; }
has_libvirt_qemu() { compgen -G '/usr/lib/*/libvirt/connection-driver/libvirt_driver_qemu.so' || compgen -G '/usr/lib*/libvirt/connection-driver/libvirt_driver_qemu.so'; }
has_qemu_iscsi() { compgen -G '/usr/lib/*/qemu/block-iscsi.so' || compgen -G '/usr/lib/qemu/block-iscsi.so'; }

need libiscsi-bin has iscsi-test-cu
need libiscsi-bin has iscsi-perf
need qemu-utils has qemu-img
need qemu-block-extra has_qemu_iscsi
need qemu-system-x86 has qemu-system-x86_64
need qemu-system-arm has qemu-system-aarch64
need qemu-efi-aarch64 test -e /usr/share/qemu-efi-aarch64/QEMU_EFI.fd
case $(uname -m) in
x86_64) need qemu-user has qemu-aarch64 ;;
aarch64) need qemu-user has qemu-x86_64 ;;
esac
need libvirt-daemon has libvirtd
need libvirt-daemon-driver-qemu has_libvirt_qemu
need libvirt-clients has virsh
need libvirt-clients has virt-xml-validate
need libxml2-utils has xmllint
need curl has curl
need tgt has tgtd
need libnbd-bin has nbdinfo
need libnbd-bin has nbdcopy
need python3-libnbd has nbdsh
need nbdkit has nbdkit
need fio has fio
need shellcheck has shellcheck
need protobuf-compiler has protoc
need e2fsprogs has mke2fs
need btrfs-progs has mkfs.btrfs
need mmdebstrap has mmdebstrap # for the clients of a later Debian
need buildah has buildah
need podman has podman
need skopeo has skopeo
need runc has runc
need libcap2-bin has setcap # for the images of a whole KubeVirt
need docker-registry has docker-registry
need iproute2 has ip
need dnsmasq-base has dnsmasq # for a node
need bzip2 has bzip2
need xz-utils has xz
need zstd has zstd
need strace has strace
need gpg has gpg # for the mirror of a test
need gpg-agent has gpg-agent
need chromium has chromium
need gcc has gcc # for the race detector
need pkgconf has pkg-config
need libvirt-dev test -e /usr/include/libvirt/libvirt.h # for KubeVirt's launcher
need libc6-dev test -e /usr/include/stdlib.h

if [ ${#missing[@]} = 0 ]; then
	exit 0
fi
mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	echo "install-tools: not installed: ${missing[*]} (as root on Debian: apt-get install ${missing[*]})" >&2
	[ "${KUBEVIRT_DISK_REQUIRE_TOOLS:-}" != 1 ]
	exit
fi

echo "install-tools: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# apt_get retries: a mirror may fail, and just after a machine has started, apt's locks may be
# taken.
apt_get() {
	local try
	for try in 1 2 3; do
		if apt-get -qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 "$@"; then
			return
		fi
		echo "install-tools: apt-get $1 failed, try $try of 3" >&2
		sleep 10
	done
	return 1
}
apt_get update || echo "install-tools: apt-get update failed; using the old package lists" >&2
apt_get install -y --no-install-recommends "${missing[@]}" >/dev/null
for service in tgt docker-registry; do
	case " ${missing[*]} " in
	*" $service "*)
		# The package starts a daemon; tgt's uses port 3260, which `make run` needs. The tests start
		# their own.
		if [ -d /run/systemd/system ]; then
			systemctl disable --now "$service" || true
		fi
		;;
	esac
done
