package guest

import (
	"bytes"
	"context"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

const bootTimeout = 8 * time.Minute

func build(t *testing.T, opt Options) (kernel, initrd string) {
	t.Helper()
	testtool.Need(t, "apt-get", "dpkg-deb")
	opt.CacheDir = filepath.Join("..", "..", "cache", "guest")
	kernel, initrd, err := Build(t.TempDir(), opt)
	Made(t, err)
	return kernel, initrd
}

// TestBoot boots a guest in QEMU. Its modules are loaded with their dependencies, commands of a
// package and of busybox work, and it reports the script's exit status and powers off.
func TestBoot(t *testing.T) {
	testtool.NeedNightly(t)
	testtool.Need(t, "qemu-system-x86_64")
	kernel, initrd := build(t, Options{
		Init: `lsmod | cut -d' ' -f1 | grep -x -e virtio_scsi -e virtio_pci -e sd_mod | sort
uname -s
mke2fs -V 2>&1 | head -n 1
cat /etc/greeting
readlink /bin/sh; readlink /bin/cat
/usr/local/bin/own
exit 7
`,
		Modules:  []string{"virtio-pci", "virtio_scsi", "sd_mod"},
		Packages: []string{"e2fsprogs"},
		Files: map[string]string{"/etc/greeting": "hello\n",
			"/usr/local/bin/own": "#!/bin/sh\necho \"$0 runs\"\n"},
	})
	ctx, cancel := context.WithTimeout(t.Context(), bootTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, "qemu-system-x86_64", "-accel", "tcg", "-m", "256",
		"-nodefaults", "-nographic", "-serial", "stdio", "-no-reboot",
		"-kernel", kernel, "-initrd", initrd, "-append",
		"console=ttyS0 quiet panic=-1").CombinedOutput()
	require.NoError(t, err, "%s", out)
	text := strings.ReplaceAll(string(out), "\r\n", "\n")
	require.Contains(t, text, "sd_mod\nvirtio_pci\nvirtio_scsi\n")
	require.Contains(t, text, "Linux\nmke2fs 1.")
	require.Contains(t, text, "hello\n")
	require.Contains(t, text, "dash\n/usr/bin/busybox\n")
	require.Contains(t, text, "/usr/local/bin/own runs\n")
	require.Contains(t, text, Ended+" 7\n")
	require.NotContains(t, text, "cannot be loaded")
}

func TestBuildRefuses(t *testing.T) {
	require.ErrorContains(t, testtool.Err2(Build(t.TempDir(), Options{})), "CacheDir")

	testtool.Need(t, "apt-get", "dpkg-deb")
	build(t, Options{})
	require.ErrorContains(t, testtool.Err2(Build(t.TempDir(),
		Options{Modules: []string{"no_such_module"},
			CacheDir: filepath.Join("..", "..", "cache", "guest")})), `no module "no_such_module"`)
}

func TestDependencies(t *testing.T) {
	require.Equal(t, []string{"libblkid1", "libc6", "logsave"}, dependencies("Package: e2fsprogs\n"+
		"Pre-Depends: libblkid1 (>= 2.36), libc6 (>= 2.34)\nDepends: logsave | other, "+
		"libc6:any\nRecommends: libnot\n"))
	require.Empty(t, dependencies("Package: static\n"))
}

// TestArchive parses an initramfs: directories come before their entries, the root is merged, and
// every entry is aligned.
func TestArchive(t *testing.T) {
	a := newArchive()
	a.file("/lib/modules/x.ko", 0o644, []byte("abc"))
	a.file("bin/tool", 0o755, []byte("#!"))
	a.symlink("sbin/link", "tool")
	a.device("dev/console", 5, 1)
	data := a.Bytes()
	var names []string
	for len(data) > 0 {
		require.Equal(t, "070701", string(data[:6]))
		field := func(n int) int {
			value := 0
			for _, c := range data[6+8*n : 14+8*n] {
				value = value<<4 | strings.IndexByte("0123456789abcdef", c)
			}
			return value
		}
		size, nameSize := field(6), field(11)
		name := string(bytes.TrimRight(data[110:110+nameSize], "\x00"))
		names = append(names, name)
		body := (110 + nameSize + 3) &^ 3
		switch name {
		case "usr/lib/modules/x.ko":
			require.Equal(t, 0o100644, field(1))
			require.Equal(t, "abc", string(data[body:body+size]))
		case "usr/bin/tool":
			require.Equal(t, 0o100755, field(1))
		case "dev/console":
			require.Equal(t, 0o020600, field(1))
			require.Equal(t, []int{5, 1}, []int{field(9), field(10)})
		}
		data = data[(body+size+3)&^3:]
	}
	require.Equal(t, []string{"usr", "usr/bin", "bin", "usr/sbin", "sbin", "usr/lib", "lib",
		"usr/lib64", "lib64",
		"usr/lib/modules", "usr/lib/modules/x.ko", "usr/bin/tool", "usr/sbin/link", "dev",
		"dev/console", "TRAILER!!!"}, names)
}

// TestMachine runs commands in a guest. Their output comes back byte for byte and line by line,
// with their status. A command that hangs ends the machine with an error that shows the console.
func TestMachine(t *testing.T) {
	testtool.NeedNightly(t)
	testtool.Need(t, "qemu-system-x86_64", "apt-get", "dpkg-deb")
	ctx, cancel := context.WithTimeout(t.Context(), bootTimeout)
	defer cancel()
	m, err := Start(ctx, MachineOptions{Dir: t.TempDir(), Guest: Options{
		Init:     "echo greeting >/tmp/init",
		CacheDir: filepath.Join("..", "..", "cache", "guest"),
	}})
	Made(t, err)
	defer m.Close()

	for _, c := range []struct {
		script, output string
		status         int
	}{
		{"cat /tmp/init", "greeting\n", 0},
		{"echo out; echo err >&2; exit 3", "out\nerr\n", 3},
		{"printf 'no end of line'", "no end of line", 0},
		{"printf 'a\\r\\n\\004\\001b\\n\\n'", "a\r\n\x04\x01b\n\n", 0},
		{"cat <<'EOF'\n  a \\ $b\nEOF\ntrue", "  a \\ $b\n", 0},
		{"no-such-command", "/tmp/.command: 1: no-such-command: not found\n", 127},
		{"ls /sys/class/net", "eth0\nlo\n", 0},
		{": " + strings.Repeat("x", 20000) + "\necho long", "long\n", 0},
	} {
		r := testtool.Must(m.Run(ctx, c.script, nil))(t)
		require.Equal(t, Result{Output: c.output, Status: c.status}, r, c.script)
	}

	var lines []string
	_, err = m.Run(ctx, "echo 1; echo; echo 2", func(line string) { lines = append(lines, line) })
	require.NoError(t, err)
	require.Equal(t, []string{"1", "", "2"}, lines)

	short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	_, err = m.Run(short, "sleep 3600", nil)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "console")
	m.Close()
}
