#!/usr/bin/env bash
# Boots a container image as a virtual machine from a LUN. It builds a small image with buildah,
# makes it a disk with kubevirt-disk, serves the disk by iSCSI, and starts QEMU. It prints the
# output of the entry point and its exit status. Ctrl-C or SIGTERM presses the machine's power
# button, so that the entry point gets its stop signal; a second one does not wait for it.
#
# The machine's writes stay in STATE/disk: a second run continues with them. IMAGE=REFERENCE boots
# another image, such as IMAGE=docker.io/library/nginx or IMAGE=oci:DIRECTORY. FORWARD=8080:80
# forwards port 8080 of this host to the machine's port 80. MEMORY_MIB (256) and CPUS (1) are the
# machine's. CONTAINER_ENV_FILE and the other variables of "kubevirt-disk serve" work, too. PORT is the port of the LUN, 3261 by
# default.
#
# Usage: run-container.sh BINARY DIRECTORY [STATE], with vmlinuz and initrd in the directory. STATE is
# cache/container by default.
set -euo pipefail

[ $# = 2 ] || [ $# = 3 ] || {
	echo "usage: $0 BINARY DIRECTORY [STATE]" >&2
	exit 2
}
binary=$(realpath "$1")
boot=$(realpath "$2")
state=${3:+$(realpath "$3")}
cd "$(dirname "$0")/.."
dir=${state:-$PWD/cache/container}
port=${PORT:-3261}
go=${GO:-go}
serial=container
mkdir -p "$dir"

fail() {
	echo "run-container: $*" >&2
	exit 1
}
need() { command -v "$1" >/dev/null || fail "$1 is not installed (Debian: apt-get install $2)"; }

case $(uname -m) in
x86_64) qemu=(qemu-system-x86_64 -machine q35) package=qemu-system-x86 console="ttyS0 no_timer_check" ;;
aarch64) qemu=(qemu-system-aarch64 -machine virt) package=qemu-system-arm console=ttyAMA0 ;;
*) fail "there is a kernel for amd64 and arm64 only" ;;
esac
need "${qemu[0]}" "$package"
need setpriv util-linux
# On some hosts, /dev/kvm exists and does not work.
kvm_works() { timeout 10 "${qemu[@]}" -accel kvm -cpu host -nodefaults -display none -monitor stdio <<<quit; }
if { (kvm_works) } >/dev/null 2>&1; then
	qemu+=(-accel kvm -cpu host)
else
	echo "run-container: there is no KVM: the machine is emulated, which takes a few seconds" >&2
	qemu+=(-accel tcg -cpu max)
fi

work=$(mktemp -d)
server=
machine=
cleanup() {
	[ -z "$machine" ] || kill "$machine" 2>/dev/null || true
	if [ -n "$server" ]; then
		kill "$server" 2>/dev/null || true
		wait "$server" 2>/dev/null || true
	fi
	rm -rf "$work"
}
trap cleanup EXIT

# Ctrl-C in a terminal reaches all processes of a session. The machine must notice it only by its
# power button, and its LUN must stay until it is off. If this process is killed, the others end,
# too.
apart=(setsid setpriv --pdeathsig TERM --)

# A small image with one static program, unless IMAGE names another one.
image=${IMAGE:-}
if [ -z "$image" ]; then
	need buildah buildah
	CGO_ENABLED=0 "$go" build -trimpath -ldflags '-s -w' -o "$work/hello" ./examples/container/hello
	cat >"$work/Containerfile" <<'EOT'
FROM scratch
COPY hello /hello
ENTRYPOINT ["/hello"]
EOT
	# The same program gives the same image, so that the disk of the last run fits. Another program
	# gets another tag, because a tag that was served before keeps its first image.
	tag=$(sha256sum "$work/hello" | cut -c 1-16)
	buildah build --quiet --format oci --timestamp 0 --identity-label=false --file "$work/Containerfile" \
		--tag kubevirt-disk-hello "$work" >/dev/null
	rm -rf "$dir/image"
	buildah push --quiet kubevirt-disk-hello "oci:$dir/image:$tag"
	image=oci:$dir/image:$tag
fi

mkdir -p "$dir/disk" "$work/none"
# IMAGE is also a variable of kubevirt-disk: an image with disks.
"${apart[@]}" env -u IMAGE CONTAINER_IMAGE="$image" CACHE_DIR="$dir/cache" PERSISTENT_DIR="$dir/disk" WORK_DIR="$dir/work" \
	DISK_DIR="$work/none" LISTEN=127.0.0.1 PORT="$port" METRICS_LISTEN='' READY_FILE="$work/ready" \
	"$binary" serve 2>"$work/log" &
server=$!
until [ -e "$work/ready" ]; do
	if ! kill -0 "$server" 2>/dev/null; then
		cat "$work/log" >&2
		server=
		fail "the image cannot be served"
	fi
	sleep 0.1
done

# The machine reports on a virtio-serial port; the entry point prints on the console.
echo "run-container: $image is served, and boots now" >&2
mkfifo "$work/monitor.in" "$work/monitor.out"
"${apart[@]}" "${qemu[@]}" -m "${MEMORY_MIB:-256}" -smp "${CPUS:-1}" -nodefaults -no-user-config -display none -no-reboot \
	-kernel "$boot/vmlinuz" -initrd "$boot/initrd" \
	-append "console=$console quiet panic=-1 kubevirt.serial=$serial" \
	-drive "if=none,id=disk,format=raw,cache=none,discard=unmap,file=iscsi://127.0.0.1:$port/iqn.2017-01.io.kubevirt:wrapper/1" \
	-device "virtio-blk-pci,drive=disk,serial=$serial" \
	-netdev "user,id=net${FORWARD:+,hostfwd=tcp:127.0.0.1:${FORWARD%:*}-:${FORWARD#*:}}" \
	-device virtio-net-pci,netdev=net,romfile= -device virtio-rng-pci \
	-chardev "file,id=words,path=$work/words" -device virtio-serial-pci \
	-device virtserialport,chardev=words,name=io.kubevirt.disk.0 \
	-chardev "pipe,id=monitor,path=$work/monitor" -mon chardev=monitor \
	-chardev stdio,id=console -serial chardev:console </dev/null &
machine=$!
trap 'echo system_powerdown 1<>"$work/monitor.in"' INT TERM # <> does not wait for a reader
wait "$machine" || true
while kill -0 "$machine" 2>/dev/null; do # wait ended because of a signal
	wait "$machine" || true
done
result=0
wait "$machine" || result=$?
machine=
trap - INT TERM
[ "$result" = 0 ] || fail "QEMU has failed; is its iSCSI driver there (Debian: apt-get install qemu-block-extra)?"
status=$(sed -n 's/^exited //p' "$work/words")
[ -n "$status" ] || fail "the machine has not reported an exit status: $(cat "$work/words")"
echo "run-container: the exit status of the entry point is $status" >&2
