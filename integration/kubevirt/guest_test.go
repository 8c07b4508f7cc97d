package kubevirt

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// vmiUID is the UID of every instance of these tests; each is alone in its pod.
const vmiUID = "3c5f2f3e-0000-4000-8000-000000000001"

// vmiOf is a small instance without disks of its own. Annotations and disks may be added.
func vmiOf(annotations map[string]string) map[string]any {
	type object = map[string]any
	return object{
		"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
		"metadata": object{"name": "vm", "namespace": "default", "uid": vmiUID,
			"annotations": annotations},
		"spec": object{
			"architecture": "amd64", "terminationGracePeriodSeconds": 30,
			"domain": object{
				"machine":   object{"type": "q35"},
				"cpu":       object{"model": "qemu64", "cores": 1, "sockets": 1, "threads": 1},
				"memory":    object{"guest": guest.MemorySize(128) + "i"},
				"resources": object{"requests": object{"memory": "128Mi"}},
				"firmware":  object{"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223"},
				"features":  object{"acpi": object{}}, // as the API server sets it
				"devices": object{"autoattachGraphicsDevice": false,
					"autoattachMemBalloon": false, "disks": []any{}, "interfaces": []any{}},
			},
			"networks": []any{}, "volumes": []any{},
		},
	}
}

// promptLine is what the guest's console shows when it waits for a command.
const promptLine = "guest login:"

// consoleShell runs in the guest: it answers each line of the console with what that command prints
// and a line with its status. The power button switches the guest off.
const consoleShell = `stty -echo
until name=$(grep -l 'Power Button' /sys/class/input/event*/device/name) &&
	event=${name%/device/name} && [ -c "/dev/input/${event##*/}" ]; do sleep 0.1; done
exec 3<"/dev/input/${event##*/}" # from now on, no press is missed
(
	dd of=/dev/null bs=24 count=1 <&3 2>/dev/null
	echo 'the power button is pressed'
	sync
	poweroff -f
) &
echo '` + promptLine + `'
while read -r line; do
	sh -c "$line" 2>&1
	printf '\nstatus %d\n' $?
done
`

// bootableDisk makes a disk from which the guest boots. Its last MiB belongs to no file.
func bootableDisk(t *testing.T) (raw string) {
	t.Helper()
	rig.Need(t, "apt-get", "dpkg-deb", "mke2fs")
	raw = filepath.Join(t.TempDir(), "guest.raw")
	err := guest.BootDisk(raw, 48<<20, guest.Options{Init: consoleShell,
		Modules:  []string{"virtio_blk", "virtio_pci", "button", "evdev"},
		CacheDir: filepath.Join("..", "..", "cache", "guest")})
	guest.Made(t, err)
	require.NoError(t, os.Truncate(raw, 64<<20))
	return raw
}

// serialConsole is the guest's console, as `virtctl console` reaches it.
type serialConsole struct {
	*rig.ConsoleLines
	of *launcher
}

// log is all that the console has shown, also before anybody was connected.
func (c serialConsole) log() string { return c.of.consoleLog() }

// console connects to the console when the guest waits for commands.
func (l *launcher) console() serialConsole {
	l.t.Helper()
	testtool.Within(l.t, rig.MachineTime, func() bool {
		require.True(l.t, l.running(), "the launcher has ended:\n%s",
			rig.LastLines(l.output.String(), 30))
		return strings.Contains(l.consoleLog(), promptLine)
	}, "the guest has booted")
	return l.connectConsole()
}

// serial is the socket of the console. Its log is beside it.
func (l *launcher) serial() string {
	return l.file(filepath.Join("kubevirt-private", vmiUID, "virt-serial0"))
}

// consoleLog is all that the console has shown in this pod.
func (l *launcher) consoleLog() string {
	text, _ := os.ReadFile(l.serial() + "-log")
	return string(text)
}

// connectConsole connects to the console of a guest that has booted.
func (l *launcher) connectConsole() serialConsole {
	l.t.Helper()
	return serialConsole{rig.NewConsole(l.t, testtool.Must(net.Dial("unix", l.serial()))(l.t)), l}
}

// run executes a command in the guest and returns what it prints, without white space around it.
func (c serialConsole) run(t *testing.T, command string) string {
	t.Helper()
	require.NoError(t, testtool.Err(c.Conn.Write([]byte(command+"\n"))))
	from := len(c.Seen)
	status := c.Until(t, "status ")
	text := strings.TrimSpace(strings.Join(c.Seen[from:len(c.Seen)-1], "\n"))
	require.Equal(t, "0", status, "%s\n%s", command, text)
	return text
}
