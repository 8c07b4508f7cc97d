package instance

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/testtool"
)

// smallExt4 mounts a new ext4 file system of that many bytes.
func smallExt4(t *testing.T, size int64) string {
	t.Helper()
	testtool.Needs(t, "root (to mount a small file system)", os.Geteuid() == 0)
	_, err := exec.LookPath("mkfs.ext4")
	testtool.Needs(t, "mkfs.ext4", err == nil)
	device, dir := filetest.Put(t, t.TempDir(), "device", nil, size), t.TempDir()
	run := func(args ...string) ([]byte, error) {
		return exec.Command(args[0], args[1:]...).CombinedOutput()
	}
	out, err := run("mkfs.ext4", "-q", "-m", "0", device)
	require.NoError(t, err, "%s", out)
	out, err = run("mount", "-o", "loop", device, dir)
	testtool.Needs(t, "a loop device (mount says "+string(out)+")", err == nil)
	t.Cleanup(func() {
		// Lazily: a process that another test starts has this one's files for a moment.
		out, err := run("umount", "--lazy", dir)
		require.NoError(t, err, "%s", out)
	})
	return dir
}

// copied replaces the image by a copy, as a restarted container finds it.
func copied(t *testing.T, path string) {
	t.Helper()
	content := filetest.Content(t, path)
	moved(t, path, content)
}

// guestFills writes to a disk until there is no space. It returns the content that the guest then
// expects.
func guestFills(t *testing.T, d disk.Disk, content []byte) []byte {
	t.Helper()
	content = append(bytes.Clone(content), make([]byte, d.Size()-int64(len(content)))...)
	full := false
	for _, n := range []int{64 << 10, 4 << 10} { // the last gaps too
		p := filetest.Block('g', n)
		full = false
		for off := 0; off+n <= len(content) && !full; off += n {
			if bytes.Equal(content[off:off+n], p) {
				continue
			}
			written, err := d.WriteAt(t.Context(), p, int64(off))
			copy(content[off:], p[:written])
			if full = err != nil; full {
				require.ErrorIs(t, err, disk.ErrNoSpace)
				// A failed write promises nothing about the rest of its range.
				_, err = d.ReadAt(t.Context(), content[off:off+n], int64(off))
				require.NoError(t, err)
			}
		}
	}
	require.True(t, full, "the disk fits into the file system")
	return content
}

// TestEphemeralDiskOnAFullVolume: a guest that has filled the volume of its ephemeral disk finds
// all its data after two restarts, whatever each start has to save. Only the guest can make room.
func TestEphemeralDiskOnAFullVolume(t *testing.T) {
	for name, volume := range map[string]func(*testing.T) string{
		"tmpfs": func(t *testing.T) string { return filetest.TinyFS(t, "6m") },
		"ext4":  func(t *testing.T) string { return smallExt4(t, 8<<20) },
	} {
		for change, settings := range map[string]func(t *testing.T, path string, opt *Options){
			"nothing":           func(*testing.T, string, *Options) {},
			"the image's inode": func(t *testing.T, path string, _ *Options) { copied(t, path) },
			"the mode": func(_ *testing.T, _ string, opt *Options) {
				opt.Mode = CopyOnRead
			},
			"the owner": func(_ *testing.T, _ string, opt *Options) {
				opt.Owner = "another"
			},
			"the serial": func(_ *testing.T, _ string, opt *Options) {
				opt.Identity.Serial = "another"
			},
			"the size": func(_ *testing.T, _ string, opt *Options) { opt.Size += 1 << 20 },
			"whether it is cloned": func(_ *testing.T, _ string, opt *Options) {
				opt.Mode = CopyClone
			},
		} {
			for _, spare := range []string{"spare", "no spare"} {
				if name == "ext4" && spare == "no spare" {
					continue // like tmpfs, and a stop waits for space
				}
				if name == "tmpfs" && spare == "spare" && testtool.Rounds(0, 1) == 0 {
					continue // like ext4
				}
				t.Run(name+"/"+change+"/"+spare, func(t *testing.T) {
					t.Parallel()
					path := filetest.Put(t, t.TempDir(), "a.raw",
						append(filetest.Sample(3<<20, 1), make([]byte, 1<<20)...), 0)
					opt := Options{WorkDir: volume(t), Mode: CopyOnWrite, Owner: "us",
						Size: 12 << 20}
					content := filetest.Content(t, path)
					inst, _ := start(t, path, opt)
					inst.copies.done.Wait() // the content of the image is known
					content = guestFills(t, inst, content)
					require.NoError(t, inst.Close())
					serial := inst.Identity.Serial
					for range 2 {
						if spare == "no spare" { // as an earlier version has left it
							require.NoError(t,
								osfile.Remove(inst.dir.state()+durable.SpareSuffix))
						}
						filetest.Fill(t, opt.WorkDir)
						settings(t, path, &opt)
						again, _ := start(t, path, opt)
						require.True(t, again.kept)
						if opt.Identity.Serial != "" {
							serial = opt.Identity.Serial
						}
						require.Equal(t, serial, again.Identity.Serial)
						require.GreaterOrEqual(t, again.Size(), opt.Size)
						require.Equal(t, -1,
							filetest.FirstDifference(content,
								filetest.ReadAll(t, again, int64(len(content)))))
						_, err := again.WriteAt(t.Context(), filetest.Block('h', 4<<10), 0)
						require.NoError(t, err, "this part has its space")
						copy(content, filetest.Block('h', 4<<10))
						require.NoError(t, again.Close())
					}
					require.NoError(t, os.Remove(filepath.Join(opt.WorkDir, "filler")))
					again, _ := start(t, path, opt)
					require.True(t, again.kept)
					require.NoError(t, again.Disk.(disk.Discarder).Discard(t.Context(), 4<<10,
						1<<20))
					clear(content[4<<10 : 4<<10+1<<20])
					require.Equal(t, -1,
						filetest.FirstDifference(content,
							filetest.ReadAll(t, again, int64(len(content)))))
				})
			}
		}
	}
}
