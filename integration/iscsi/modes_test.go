package iscsi

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/targettest"
)

const modesSize = 48 << 20

// modeImages makes a directory with one image of each kind, all with the same content, and returns
// the content as a raw file.
func modeImages(t *testing.T) (dir, source string, names []string) {
	t.Helper()
	dir, source = t.TempDir(), filepath.Join(t.TempDir(), "source.raw")
	rig.MakeRaw(t, source, modesSize)
	rig.MakeRaw(t, filepath.Join(dir, "1-plain.raw"), modesSize)
	rig.MakeQcow2(t, source, filepath.Join(dir, "2-plain.qcow2"), "", false)
	rig.MakeQcow2(t, source, filepath.Join(dir, "3-zlib.qcow2"), "cluster_size=2M", true)
	rig.MakeQcow2(t, source, filepath.Join(dir, "4-zstd.qcow2"), "compression_type=zstd", true)
	return dir, source, []string{"1-plain.raw", "2-plain.qcow2", "3-zlib.qcow2", "4-zstd.qcow2"}
}

// TestCopyModes: QEMU uses every kind of image in every mode that copies, ephemeral and persistent.
// It reads the image, and writes, zeroes and discards. All changes must be there after the daemon
// was killed.
func TestCopyModes(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", "qemu-io", rig.QEMUISCSI)
	dir, source, names := modeImages(t)
	for _, mode := range []string{"copy-on-write", "copy-on-read", "clone"} {
		for _, kind := range []string{"ephemeral", "persistent"} {
			t.Run(mode+"/"+kind, func(t *testing.T) {
				c := rig.Config{DiskDir: dir, StateDir: t.TempDir(),
					Env: map[string]string{"COPY_MODE": mode}}
				if kind == "persistent" {
					c.Env["PERSISTENT_DIR"] = rig.NewVolume(t, c.StateDir)
				}
				d := changeAndKill(t, c, source, names)
				qemuIO(t, d.URL(1), []string{"write -P 0x77 0 64k"})
				d.Stop()
				// Now a copy-on-write disk has only the changes.
				for _, name := range names {
					path := filepath.Join(c.StateDir, "work", name, "disk.raw")
					if kind == "persistent" {
						path = filepath.Join(c.StateDir, "volume", name, "disk.img")
					}
					require.EqualValues(t, modesSize, size(t, path))
					if mode == "copy-on-write" {
						require.Less(t, allocated(t, path), int64(6<<20), "%s", name)
					}
				}
			})
		}
	}
}

// changeAndKill writes to disks with the same content and kills the daemon. A new daemon, which it
// returns, must have the content and the changes.
func changeAndKill(t *testing.T, c rig.Config, source string, names []string) *rig.Daemon {
	t.Helper()
	want := filepath.Join(t.TempDir(), "want.raw")
	require.NoError(t, os.WriteFile(want, testtool.Must(os.ReadFile(source))(t), 0o644))
	changes := []string{"write -P 0x5a 1M 3M", "write -P 0xa5 7680 1024", "write -z 20M 2M",
		"discard 40M 4M", "write -P 0x11 33554432 512", "flush"}
	qemuIO(t, want, changes)
	qemuIO(t, want, []string{"write -z 40M 4M"}) // a discarded range reads as zeros

	d := rig.Start(t, c)
	for i := range names {
		qemuIO(t, d.URL(i+1), changes)
	}
	d.Crash()
	d = rig.Start(t, c)
	for i, name := range names {
		t.Log(name)
		rig.Same(t, want, d.URL(i+1))
	}
	return d
}

// qemuIO runs qemu-io commands on a raw disk.
func qemuIO(t *testing.T, url string, commands []string) {
	t.Helper()
	args := []string{"-f", "raw", "-d", "unmap"}
	for _, c := range commands {
		args = append(args, "-c", c)
	}
	require.NotContains(t, rig.OK(t, "qemu-io", append(args, url)...), "failed", "%s", commands)
}

// TestPersistentCloneIsAPlainFile: in mode clone, a complete persistent disk is just disk.img. It
// has the image and the guest's changes, for everybody who mounts the volume.
func TestPersistentCloneIsAPlainFile(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", "qemu-io", rig.QEMUISCSI)
	dir, source := t.TempDir(), filepath.Join(t.TempDir(), "source.raw")
	rig.MakeRaw(t, source, modesSize)
	rig.MakeQcow2(t, source, filepath.Join(dir, "disk.qcow2"), "", true)
	volume := t.TempDir()
	d := rig.Start(t, rig.Config{DiskDir: dir,
		Env: map[string]string{"PERSISTENT_DIR": volume, "SIZE": "64Mi"}})
	qemuIO(t, d.URL(1), []string{"write -P 0x5a 60M 1M", "flush"})
	d.Until("the disk is complete", func() bool {
		return strings.Contains(d.Get("/status"), `"complete": true`) ||
			strings.Contains(d.Get("/status"), `"complete":true`)
	})
	d.Stop()
	qemuIO(t, source, []string{"truncate 64M", "write -P 0x5a 60M 1M"})
	rig.Same(t, source, filepath.Join(volume, "disk.img"))
	left := testtool.Must(filepath.Glob(filepath.Join(volume, "*")))(t)
	var names []string
	for _, path := range left {
		// the rest differs between disks
		name, _, _ := strings.Cut(filepath.Base(path), "unit-")
		names = append(names, name)
	}
	// The map is gone. The unit's file keeps the owner, for a handover after a restart. The state
	// has spare space, so that it can always be saved again.
	require.Equal(t, []string{"disk.img", "disk.img.lock", "disk.img.state", "disk.img.state.spare",
		"disk.img."}, names)
}

// TestFullWorkDirectory: the directory of the disks is full. The guest's writes fail as on a full
// thin disk, and its reads work. When there is space again, the guest and the copying go on.
func TestFullWorkDirectory(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", "qemu-io", rig.QEMUISCSI)
	dir, source := t.TempDir(), filepath.Join(t.TempDir(), "source.raw")
	rig.MakeRaw(t, source, modesSize)
	rig.MakeQcow2(t, source, filepath.Join(dir, "disk.qcow2"), "", true)
	work := t.TempDir() // not with the ready file, for which copying would leave no space
	rig.MountTmpfs(t, work, "96m")
	d := rig.Start(t, rig.Config{DiskDir: dir,
		Env: map[string]string{"COPY_MODE": "copy-on-write", "WORK_DIR": work}})
	filler := filepath.Join(work, "filler")
	fill(t, filler)
	r := rig.Client(t, nil, "qemu-io", "-f", "raw", "-c", "write -P 0x5a 0 2M", d.URL(1))
	require.True(t, r.Status != 0 || strings.Contains(r.Output, "failed"), "%s", r)
	rig.Same(t, source, d.URL(1))
	require.NoError(t, os.Remove(filler))
	qemuIO(t, d.URL(1), []string{"write -P 0x5a 0 2M", "flush"})
	qemuIO(t, source, []string{"write -P 0x5a 0 2M"})
	rig.Same(t, source, d.URL(1))
	d.Stop()

	// Copying waits for space, then completes the same disk.
	fill(t, filler)
	require.NoError(t, os.Truncate(filler, size(t, filler)-256<<10))
	d = rig.Start(t, rig.Config{DiskDir: dir,
		Env: map[string]string{"COPY_MODE": "clone", "WORK_DIR": work}})
	d.Until("it is out of space",
		func() bool { return strings.Contains(d.Output(), "no space is left to copy the image") })
	// Copying tries again and again, at first after short pauses.
	d.Until("it waits for space", func() bool { return d.Status().LUNs[0].Copy.WaitsForSpace })
	d.Until("the metrics tell", func() bool {
		return strings.Contains(d.Get("/metrics"),
			`kubevirt_disk_waits_for_space{image="disk.qcow2",lun="1"} 1`)
	})
	require.Less(t, d.Status().LUNs[0].Space.Free, int64(4<<20))
	rig.Same(t, source, d.URL(1))
	require.NoError(t, os.Remove(filler))
	d.Until("the disk is complete", func() bool { return d.Complete(1) })
	require.False(t, d.Status().LUNs[0].Copy.WaitsForSpace)
	require.Contains(t, d.Get("/metrics"),
		`kubevirt_disk_waits_for_space{image="disk.qcow2",lun="1"} 0`)
	rig.Same(t, source, d.URL(1))
}

// TestReadyFileOnAFullFileSystem: disks are served even if there is no space for the content of the
// ready file, for example because copying took the last of it.
func TestReadyFileOnAFullFileSystem(t *testing.T) {
	t.Parallel()
	state := t.TempDir()
	rig.MountTmpfs(t, state, "64k")
	fill(t, filepath.Join(state, "filler"))
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 1<<20), StateDir: state,
		Env: map[string]string{"WORK_DIR": t.TempDir()}})
	require.Zero(t, size(t, d.ReadyFile))
	require.Equal(t, "ok\n", d.Get("/readyz"))
	d.Stop()
	require.NoFileExists(t, d.ReadyFile)
	d = rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 1<<20), StateDir: state,
		Env: map[string]string{"WORK_DIR": t.TempDir()}})
	d.Crash()
	require.FileExists(t, d.ReadyFile)
	// in place of the file of a killed daemon
	rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 1<<20), StateDir: state,
		Env: map[string]string{"WORK_DIR": t.TempDir()}})
}

// fill takes all the space that is left.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	require.NoError(t, err)
	defer f.Close()
	for chunk := make([]byte, 64<<10); err == nil; {
		for i := range chunk {
			chunk[i] = 0xff
		}
		_, err = f.Write(chunk)
	}
	require.ErrorContains(t, err, "no space")
}

// size is a file's length; allocated is the space that it takes on its file system. Both in bytes.
func size(t *testing.T, path string) int64      { return rig.FileStat(t, path).Size }
func allocated(t *testing.T, path string) int64 { return rig.FileStat(t, path).Blocks * 512 }

// TestRestartOnAFullVolume: the guest has filled the volume that holds all data of the daemon. The
// daemon is killed, and when its container restarts, the image has another inode. The guest's
// writes must still be there, even after the next restart. Only another image frees the space.
func TestRestartOnAFullVolume(t *testing.T) {
	t.Parallel()
	rig.Need(t)
	const diskSize, chunk = 32 << 20, 64 << 10
	state, images := t.TempDir(), rig.DiskDir(t, diskSize)
	rig.MountTmpfs(t, state, "4m")
	image := filepath.Join(images, "disk.raw")
	want := testtool.Must(os.ReadFile(image))(t)
	c := rig.Config{DiskDir: images, StateDir: state,
		Env: map[string]string{"COPY_MODE": "copy-on-write", "LEFTOVERS": "remove"}}
	d := rig.Start(t, c)
	d.Until("the image's hash is known", func() bool {
		found, err := filepath.Glob(filepath.Join(state, "*", "disk.raw", "state.json"))
		require.NoError(t, err)
		require.Len(t, found, 1)
		text := testtool.Must(os.ReadFile(found[0]))(t)
		return regexp.MustCompile(`"xxh3":"[0-9a-f]+"`).Match(text)
	})
	s, full := rig.LoginTo(t, d, "iqn.2026-01.test:guest"), false
	for _, n := range []int{chunk, 512} {
		for off, refused := 0, 0; off < diskSize && refused == 0; off += n {
			data := bytes.Repeat([]byte{byte(1 + off/n%255)}, n)
			if bytes.Equal(want[off:off+n], data) {
				continue
			}
			switch r := rig.Do(t, s, targettest.Write10(1, uint32(off/512), data)); r.Status {
			case 0:
				copy(want[off:], data)
			default:
				refused++
				copy(want[off:], rig.Do(t, s, targettest.Read10(1, uint32(off/512), n/512)).Data)
				full = true
			}
		}
	}
	require.True(t, full)
	serial := d.Status().LUNs[0].Serial
	for _, mode := range []string{"copy-on-write", "copy-on-read", "copy-on-read", "clone"} {
		d.Crash()
		require.NoError(t, os.WriteFile(image+".new", testtool.Must(os.ReadFile(image))(t), 0o600))
		require.NoError(t, os.Rename(image+".new", image))
		c.Env["COPY_MODE"] = mode
		d = rig.Start(t, c)
		require.Equal(t, serial, d.Status().LUNs[0].Serial, d.Output())
		s = rig.LoginTo(t, d, "iqn.2026-01.test:guest")
		for off := 0; off < diskSize; off += chunk {
			r := rig.Do(t, s, targettest.Read10(1, uint32(off/512), chunk/512))
			require.Zero(t, r.Status)
			require.True(t, bytes.Equal(want[off:off+chunk], r.Data), "mode %s, byte %d", mode, off)
		}
	}
	// The disk of a removed image makes room for the disk of the present image.
	d.Crash()
	require.NoError(t, os.Rename(image, filepath.Join(images, "another.raw")))
	c.Env["COPY_MODE"] = "copy-on-write"
	d = rig.Start(t, c)
	require.NotEqual(t, serial, d.Status().LUNs[0].Serial)
	d.UntilSaid("removed the disk of an image that is gone")
}
