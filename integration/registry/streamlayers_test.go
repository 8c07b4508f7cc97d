package registry

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
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
	"kubevirt.io/disk/target/targettest"
)

// pushBuilt builds an image of a file with buildah, and pushes it.
func pushBuilt(t *testing.T, address, file string, args ...string) {
	t.Helper()
	e := rig.OwnEngine(t)
	work, base := t.TempDir(), filepath.Base(file)
	require.NoError(t, os.Link(file, filepath.Join(work, base)))
	dockerfile := filepath.Join(work, "Dockerfile")
	require.NoError(t, os.WriteFile(dockerfile, []byte("FROM scratch\nADD "+base+" /disk/\n"),
		0o644))
	name := address + "/vm/fedora:42"
	e.OK(t, "buildah", "build", "--quiet", "--file", dockerfile, "--tag", name, work)
	e.OK(t, "buildah", append(append([]string{"push", "--tls-verify=false"}, args...), name)...)
}

// TestStreamWhenComplete serves an uncompressed layer before it is verified, and verifies it
// meanwhile, in every mode.
func TestStreamWhenComplete(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img")
	raw := rig.NewLargeDisk(t)
	w := rig.NewWatchedRegistry(t)
	rig.PushPlain(t, w.Address, raw)
	for _, mode := range []string{"copy-on-write", "clone"} {
		t.Run(mode, func(t *testing.T) {
			w.Flips.Store(false)
			c := streaming(t.TempDir(), w.Proxy, mode, "--verify=when-complete")
			c.StateDir = t.TempDir()
			d := rig.Start(t, c)
			require.Contains(t, d.Output(), "served before its content is verified")
			rig.Same(t, raw, d.URL(1))
			d.Until("it is verified", func() bool { return verified(t, c.StateDir) })
			require.Contains(t, d.Get("/metrics"), "kubevirt_disk_lun_failed{")
			d.Stop()
			d = rig.Start(t, c)
			require.NotContains(t, d.Output(), "served before its content is verified")
			rig.Same(t, raw, d.URL(1))
			d.Stop()
		})
		t.Run("wrong "+mode, func(t *testing.T) {
			w.Flips.Store(true)
			c := streaming(t.TempDir(), w.Proxy, mode, "--verify=when-complete")
			c.StateDir = t.TempDir()
			d := rig.Start(t, c)
			d.UntilSaid("the image has wrong content")
			s := rig.LoginTo(t, d, "iqn.2026-01.test:first")
			require.NoError(t, testtool.Err(s.ClearAttention(1)))
			for _, command := range []targettest.Command{rig.ReadBlock(1, 0),
				targettest.Write10(1, 7, rig.Block(7, 0x5a))} {
				r := rig.Do(t, s, command)
				require.False(t, r.Good())
				require.EqualValues(t, 3, r.Sense.Key, "MEDIUM ERROR")
			}
			rig.Logout(t, s)
			require.Contains(t, d.Get("/status"), "wrong content")
			require.Regexp(t, `(?m)^kubevirt_disk_lun_failed{.*} 1`, d.Get("/metrics"))
			d.Crash()
			_, output := rig.Refused(t, c)
			require.Contains(t, output, "remove the disk")
		})
	}
}

// verified reports whether the layer of the image was verified, according to the notes.
func verified(t *testing.T, dir string) bool {
	names := testtool.Must(filepath.Glob(filepath.Join(dir, "*", ".images", "notes-*")))(t)
	more := testtool.Must(filepath.Glob(filepath.Join(dir, ".images", "notes-*")))(t)
	for _, name := range append(names, more...) {
		content, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it was replaced meanwhile
		}
		require.NoError(t, err)
		if len(content) > 8 && content[8] == 1 {
			return true
		}
	}
	return false
}

// TestStreamChunked serves an image that podman has pushed as zstd:chunked, without fetching it
// first.
func TestStreamChunked(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img", "buildah", "podman")
	rig.NeedRoot(t)
	raw := rig.NewLargeDisk(t)
	w := rig.NewWatchedRegistry(t)
	pushBuilt(t, w.Address, raw, "--compression-format=zstd:chunked")
	d := rig.Start(t, streaming(t.TempDir(), w.Proxy, "copy-on-write"))
	s := rig.LoginTo(t, d, "iqn.2026-01.test:first")
	require.NoError(t, testtool.Err(s.ClearAttention(1)))
	require.True(t, rig.Do(t, s, rig.ReadBlock(1, 0)).Good())
	rig.Logout(t, s)
	require.Less(t, w.Asked(), 20, "it was not fetched first")
	require.NotContains(t, d.Output(), "is fetched and verified before")
	rig.Same(t, raw, d.URL(1))
	require.Regexp(t, `(?m)^kubevirt_disk_registry_wrong_chunks_total 0`, d.Get("/metrics"))
}

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
	guest.Made(t, err)
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
