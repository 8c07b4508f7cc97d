package iscsi

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/target/targettest"
)

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
	want, err := os.ReadFile(image)
	require.NoError(t, err)
	c := rig.Config{DiskDir: images, StateDir: state,
		Env: map[string]string{"COPY_MODE": "copy-on-write", "LEFTOVERS": "remove"}}
	d := rig.Start(t, c)
	d.Until("the image's hash is known", func() bool {
		found, err := filepath.Glob(filepath.Join(state, "*", "disk.raw", "state.json"))
		require.NoError(t, err)
		require.Len(t, found, 1)
		text, err := os.ReadFile(found[0])
		require.NoError(t, err)
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
		copyOf, err := os.ReadFile(image)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(image+".new", copyOf, 0o600))
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
	require.Contains(t, d.Output(), "removed the disk of an image that is gone")
}
