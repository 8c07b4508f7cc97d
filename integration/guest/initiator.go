package guest

import (
	"fmt"
	"strings"
)

// initiatorInit starts udev and the kernel's initiator.
const initiatorInit = `
cp /usr/share/base-passwd/passwd.master /etc/passwd
cp /usr/share/base-passwd/group.master /etc/group
mkdir -p /run/lock /var/lib/iscsi
ln -s /run/lock /var/lock
ln -s /run /var/run
ip link set eth0 up
ip addr add 10.0.2.15/24 dev eth0
ip route add default via 10.0.2.2
/lib/systemd/systemd-udevd --daemon
# A ping waits 5 seconds for its answer, which an emulated machine can take to get round to it.
sed -i 's/^node.conn\[0\].timeo.noop_out_timeout = .*/node.conn[0].timeo.noop_out_timeout = 60/' /etc/iscsi/iscsid.conf
iscsid
`

// readAhead makes the guest read little ahead. The TCP of QEMU's user network has windows of at
// most 64 KiB. It stalls for 5 seconds when a window has closed, which needs more data on the way
// than that.
const readAhead = `ACTION=="add", SUBSYSTEM=="block", KERNEL=="sd*[!0-9]", ATTR{queue/read_ahead_kb}="16"
`

// Initiator is a guest with open-iscsi and udev, whose initiator has a name. It reaches what the
// machine reaches, under the same addresses, but for loopback.
func Initiator(name string) Options {
	return Options{
		Init:     initiatorInit,
		Modules:  []string{"crc32c_intel", "iscsi_tcp", "sd_mod", "ext4"},
		Packages: []string{"base-passwd", "e2fsprogs", "fdisk", "open-iscsi", "udev", "util-linux"},
		Files: map[string]string{
			"/etc/iscsi/initiatorname.iscsi":       "InitiatorName=" + name + "\n",
			"/etc/udev/rules.d/99-readahead.rules": readAhead,
		},
	}
}

// ISCSI is an iSCSI volume, with the fields and the names that a PersistentVolume has.
type ISCSI struct {
	TargetPortal      string                `yaml:"targetPortal"`
	IQN               string                `yaml:"iqn"`
	Lun               int32                 `yaml:"lun"`
	ISCSIInterface    string                `yaml:"iscsiInterface"`
	Portals           []string              `yaml:"portals"`
	DiscoveryCHAPAuth bool                  `yaml:"chapAuthDiscovery"`
	SessionCHAPAuth   bool                  `yaml:"chapAuthSession"`
	SecretRef         struct{ Name string } `yaml:"secretRef"`
	InitiatorName     *string               `yaml:"initiatorName"`
}

// Attach is what the kubelet does to attach a volume, as a script for an Initiator: AttachDisk in
// k8s.io/kubernetes/pkg/volume/iscsi. The other string is the path of the block device.
func Attach(v *ISCSI, secret map[string][]byte) (script,
	device string, err error) {
	if len(v.Portals) > 0 || v.InitiatorName != nil ||
		v.ISCSIInterface != "" && v.ISCSIInterface != "default" {
		return "", "", fmt.Errorf("guest: this does not do what the kubelet does for %+v", v)
	}
	var b strings.Builder
	b.WriteString("iscsiadm -m iface -I default -o show >/dev/null\n")
	found := fmt.Sprintf("iscsiadm -m discoverydb -t sendtargets -p %s -I default", v.TargetPortal)
	node := fmt.Sprintf("iscsiadm -m node -p %s -T %s", v.TargetPortal, v.IQN)
	update := func(command, key, value string) {
		fmt.Fprintf(&b, "%s -o update -n %s -v %s\n", command, key, value)
	}
	credential := func(command, prefix string) {
		update(command, prefix+"authmethod", "CHAP")
		for _, key := range []string{"username", "password", "username_in", "password_in"} {
			if value := secret[prefix+key]; len(value) > 0 {
				update(command, prefix+key, string(value))
			}
		}
	}
	b.WriteString(found + " -o new\n")
	if v.DiscoveryCHAPAuth {
		credential(found, "discovery.sendtargets.auth.")
	}
	b.WriteString(found + " --discover\n")
	update(node+" -I default", "node.session.scan", "manual")
	if v.SessionCHAPAuth {
		credential(node+" -I default", "node.session.auth.")
	}
	b.WriteString(node + " -I default --login\n")
	update(node, "node.startup", "manual")
	device = fmt.Sprintf("/dev/disk/by-path/ip-%s-iscsi-%s-lun-%d", v.TargetPortal, v.IQN, v.Lun)
	// The kernel may not have seen yet that the session is logged in. The kubelet tries again, too.
	fmt.Fprintf(&b, `for try in $(seq 60); do
	for host in /sys/class/iscsi_host/host*; do
		echo 0 0 %d >/sys/class/scsi_host/${host##*/}/scan
	done
	! udevadm wait --settle --timeout=2 %s || break
done
test -b %[2]s
`, v.Lun, device)
	return b.String(), device, nil
}
