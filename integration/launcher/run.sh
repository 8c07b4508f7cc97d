#!/usr/bin/env bash
# Runs KubeVirt's virt-launcher as the container "compute" of a launcher pod runs it: as user 107,
# with only the capability that KubeVirt leaves it. It makes the domain of one virtual machine
# instance, and QEMU emulates the processor. Everything outside of DIR and HOOKS is private: call it
# in namespaces of its own, whose end ends everything in them.
#
#   unshare -m -n -p -f --mount-proc --kill-child run.sh LAUNCHER DIR VMI HOOKS [OPTION...]
#
# LAUNCHER is the program, which scripts/build-launcher.sh builds. DIR is an empty directory for what
# the launcher needs. VMI is the file of the instance, in JSON; if it is empty, the launcher waits for
# virt-handler. HOOKS is the volume of the hook sidecars' sockets, and the variable PLUGIN_SOCKETS,
# if it is set, that of the plugins'. The options are the launcher's.
# When it has ended, this ends with its status.
set -euo pipefail
launcher=$1 dir=$2 vmi=$3 hooks=$4
shift 4
readonly user=107

mount --make-rprivate /
if [ -s "$vmi" ]; then
	STANDALONE_VMI=$(cat "$vmi")
	export STANDALONE_VMI
fi
mkdir "$dir"/{sbin,programs}
touch "$dir/virt-launcher"
mount --bind "$launcher" "$dir/virt-launcher"

# Debian has one libvirt daemon for all drivers, where KubeVirt's image has one for QEMU only.
mount --bind /usr/sbin "$dir/programs"
ln -s "$dir/programs"/* "$dir/sbin/"
ln -sf "$dir/programs/libvirtd" "$dir/sbin/virtqemud"
mount --bind "$dir/sbin" /usr/sbin

# All of /etc is a copy. A mount over one file there ends when somebody outside replaces that file, as
# the installation of a package replaces passwd.
cp -a /etc "$dir/etc"
rm -rf "$dir/etc/libvirt"
mkdir "$dir/etc/libvirt"
cat >"$dir/etc/libvirt/qemu.conf" <<'CONF'
stdio_handler = "logd"
namespaces = [ ]
cgroup_controllers = [ ]
dynamic_ownership = 0
remember_owner = 0
security_driver = "none"
CONF
echo 'log_outputs = "3:stderr"' |
	tee "$dir/etc/libvirt/virtqemud.conf" >"$dir/etc/libvirt/virtlogd.conf"

# The launcher looks for its user by name.
sed -i "/^qemu:/d; /^[^:]*:[^:]*:$user:/d" "$dir"/etc/{passwd,group}
echo "qemu:x:$user:$user::/:/bin/false" >>"$dir/etc/passwd"
echo "qemu:x:$user:" >>"$dir/etc/group"
mount --bind "$dir/etc" /etc

# A device for virtualization that is there would be used, whether it works or not.
mkdir "$dir/dev"
mount -t tmpfs tmpfs "$dir/dev"
for name in null zero full random urandom tty; do
	touch "$dir/dev/$name"
	mount --bind "/dev/$name" "$dir/dev/$name"
done
mkdir "$dir/dev/shm" "$dir/dev/pts"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$dir/dev/pts"
ln -s pts/ptmx "$dir/dev/ptmx"
ln -s /proc/self/fd "$dir/dev/fd"
chmod 1777 "$dir/dev/shm"
mount --rbind "$dir/dev" /dev

mkdir "$dir/run"
mkdir -p "$dir"/run/{libvirt/qemu,kubevirt,kubevirt-private,kubevirt-ephemeral-disks}
ln -s libvirt-sock "$dir/run/libvirt/virtqemud-sock"
chown -R "$user:$user" "$dir/run"
mkdir "$dir/run/kubevirt-hooks"
mount --bind "$hooks" "$dir/run/kubevirt-hooks"
if [ -n "${PLUGIN_SOCKETS:-}" ]; then
	mkdir "$dir/run/kubevirt-plugin"
	mount --bind "$PLUGIN_SOCKETS" "$dir/run/kubevirt-plugin"
fi
mount --rbind "$dir/run" /run
cd /

# The shell stays, because the first process of a pod collects what has ended.
setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs \
	--bounding-set -all,+net_bind_service --inh-caps -all,+net_bind_service \
	--ambient-caps -all,+net_bind_service \
	env HOME=/ XDG_CACHE_HOME=/run/kubevirt-private XDG_CONFIG_HOME=/run/kubevirt-private \
	XDG_RUNTIME_DIR=/run "$dir/virt-launcher" --run-as-nonroot --allow-emulation "$@" &
trap 'kill -TERM %1' TERM
status=0
wait %1 || status=$?
if kill -0 %1 2>/dev/null; then # a signal has ended the wait
	status=0
	wait %1 || status=$?
fi
exit "$status"
