package registry

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// newFileSystem makes a raw disk with files, and with their digests in "sums".
func newFileSystem(t *testing.T) (raw string) {
	t.Helper()
	tree := t.TempDir()
	random := rand.NewChaCha8([32]byte{7})
	var sums strings.Builder
	for i := range 48 {
		content := make([]byte, 512<<10)
		_, _ = random.Read(content)
		name := fmt.Sprintf("file-%02d", i)
		require.NoError(t, os.WriteFile(filepath.Join(tree, name), content, 0o644))
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(content), name)
	}
	require.NoError(t, os.WriteFile(filepath.Join(tree, "sums"), []byte(sums.String()), 0o644))
	raw = filepath.Join(t.TempDir(), "fedora.raw")
	require.NoError(t, os.WriteFile(raw, nil, 0o644))
	require.NoError(t, os.Truncate(raw, 48<<20))
	out, err := exec.Command("mke2fs", "-q", "-F", "-t", "ext4", "-d", tree, raw).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return raw
}

// TestStreamGuest: a Linux guest has its file system on a streamed LUN. While it reads its files,
// the registry goes away. The guest goes on when the registry is back, and does not complain. The
// guest's first reads are recorded, and another daemon fetches them ahead at its start.
func TestStreamGuest(t *testing.T) {
	t.Parallel() // a guest has one processor
	rig.Need(t, "docker-registry", "mke2fs", "qemu-system-x86_64", rig.QEMUISCSI, "apt-get",
		"dpkg-deb")
	w := rig.NewWatchedRegistry(t)
	raw := newFileSystem(t)
	rig.Push(t, w.Address, raw)
	order := filepath.Join(t.TempDir(), "boot.order")
	d := rig.Start(t, streaming(t.TempDir(), w.Proxy, "copy-on-write", "--record-boot="+order))

	opened := w.Asked() // requests to open it, without a boot order

	ctx, cancel := context.WithTimeout(t.Context(), rig.GuestBoot)
	defer cancel()
	m, err := guest.Start(ctx, guest.MachineOptions{Dir: t.TempDir(),
		Guest: guest.Options{Modules: []string{"virtio_blk", "crc32c_intel", "ext4"},
			CacheDir: filepath.Join("..", "..", "cache", "guest")},
		Args: []string{"-drive", "if=none,id=disk,format=raw,file=" + d.URL(1),
			"-device", "virtio-blk-pci,drive=disk"}})
	var fetch *guest.FetchError
	if errors.As(err, &fetch) && os.Getenv(rig.NeedEnv) != "1" {
		t.Skip(err.Error())
	}
	require.NoError(t, err)
	t.Cleanup(m.Close)
	g := &rig.KernelGuest{Machine: m}
	g.OK(t, `for i in $(seq 3000); do test -b /dev/vda && break; sleep 0.1; done
mount -t ext4 /dev/vda /mnt
cat /mnt/file-00 /mnt/file-01 >/dev/null
dmesg -c >/dev/null`)

	w.Kill()
	g.OK(t, `cat >/tmp/read.sh <<'END'
cd /mnt && sha256sum -c sums >/tmp/read.log 2>&1
echo $? >/tmp/result
END
setsid sh /tmp/read.sh </dev/null >/dev/null 2>&1 &`)
	testtool.Within(t, rig.GuestCommand, func() bool {
		return strings.Contains(d.Output(), "next try in")
	}, "reads wait: %s", func() any { return d.Output() })
	g.OK(t, "test ! -e /tmp/result")
	w.Run(t)
	g.OK(t, `for i in $(seq 3000); do test -e /tmp/result && break; sleep 0.1; done
tail -n 3 /tmp/read.log
test "$(cat /tmp/result)" = 0
touch /mnt/written
sync
umount /mnt`)
	require.Empty(t, g.OK(t, "dmesg | grep -iE 'error|EXT4.*warn' || true"))
	m.Close()
	d.Stop()

	// On another machine, only the boot order is fetched before anybody logs in.
	rig.MustRun(t, nil, "push", "--base=none", "--insecure-registry="+w.Address,
		"--boot-order="+order, raw, w.Address+"/vm/fedora:42")
	w.Forget()
	rig.Start(t, streaming(t.TempDir(), w.Proxy, "copy-on-write"))
	chunks := orderedChunks(t, order)
	require.Positive(t, chunks)
	testtool.Within(t, rig.Timeout, func() bool { return w.Asked() > opened+chunks/2 },
		"%d chunks in the order, %d requests without it", chunks, opened)
}

// orderedChunks returns how many chunks of 256 KiB a boot order names. Its lines are blocks of 64
// KiB, each with the number of blocks that follow. A slow guest reads less while it is recorded.
func orderedChunks(t *testing.T, order string) int {
	t.Helper()
	chunks := map[int]bool{}
	for line := range strings.Lines(rig.ReadFile(t, order)) {
		first, more, _ := strings.Cut(strings.TrimSpace(line), "+")
		block, err := strconv.Atoi(first)
		if err != nil {
			continue // the first lines name the format and the disk
		}
		following := 0
		if more != "" {
			following = testtool.Must(strconv.Atoi(more))(t, line)
		}
		for b := block; b <= block+following; b++ {
			chunks[b/4] = true
		}
	}
	return len(chunks)
}
