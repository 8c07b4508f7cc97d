package iscsi

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/target/targettest"
)

// TestStopUnderLoad stops the daemon, with SIGTERM and with kill -9, while an initiator writes. All
// acknowledged writes are there after a restart with the same image.
func TestStopUnderLoad(t *testing.T) {
	t.Parallel()
	rig.Need(t)
	for name, stop := range map[string]func(*rig.Daemon){"SIGTERM": (*rig.Daemon).Stop,
		"kill -9": (*rig.Daemon).Crash} {
		t.Run(name, func(t *testing.T) {
			dir, state := rig.DiskDir(t, 32<<20), t.TempDir()
			d := rig.Start(t, rig.Config{DiskDir: dir, StateDir: state})
			s := rig.LoginTo(t, d, "iqn.2026-01.test:writer")
			acknowledged := make(chan uint32, 1)
			begun := make(chan struct{})
			go func() {
				n := uint32(0)
				for ; n < 60000; n++ {
					r, err := s.Do(targettest.Write10(1, n, rig.Block(n, 0xa5)))
					if err != nil || !r.Good() {
						break
					}
					if n == 200 {
						close(begun)
					}
				}
				acknowledged <- n
			}()
			select {
			case <-begun:
			case n := <-acknowledged: // both may have happened by now
				require.Greater(t, n, uint32(200), "writing ended before the daemon was stopped")
				acknowledged <- n
			}
			stop(d)
			n := <-acknowledged
			t.Logf("%d blocks were acknowledged", n)

			d = rig.Start(t, rig.Config{DiskDir: dir, StateDir: state})
			s = rig.LoginTo(t, d, "iqn.2026-01.test:reader")
			for lba := uint32(0); lba < n; {
				count := min(n-lba, 128)
				data := rig.Do(t, s, targettest.Read10(1, lba, int(count))).Data
				for i := range count {
					require.Equal(t, rig.Block(lba+i, 0xa5), data[i*512:][:512], "block %d", lba+i)
				}
				lba += count
			}
		})
	}
}

// TestChangedImage replaces the image. The daemon does not serve the old disk again, and the log
// says which disk and why.
func TestChangedImage(t *testing.T) {
	t.Parallel()
	rig.Need(t)
	dir, state := rig.DiskDir(t, 8<<20), t.TempDir()
	d := rig.Start(t, rig.Config{DiskDir: dir, StateDir: state})
	s := rig.LoginTo(t, d, "iqn.2026-01.test:a")
	require.True(t, rig.Do(t, s, targettest.Write10(1, 0, rig.Block(0, 1))).Good())
	rig.Logout(t, s)
	d.Stop()

	rig.MakeRawSeed(t, filepath.Join(dir, "disk.raw"), 8<<20, 2)
	d = rig.Start(t, rig.Config{DiskDir: dir, StateDir: state})
	want, err := os.ReadFile(filepath.Join(dir, "disk.raw"))
	require.NoError(t, err)
	s = rig.LoginTo(t, d, "iqn.2026-01.test:b")
	require.Equal(t, want[:512], rig.Do(t, s, rig.ReadBlock(1, 0)).Data)
	require.Contains(t, d.Output(), "disk.raw")
	require.Contains(t, d.Output(), "changed")
}

// TestSeveralInitiators: several initiators write and read a shared LUN at once.
func TestSeveralInitiators(t *testing.T) {
	t.Parallel()
	rig.Need(t)
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 32<<20),
		Env: map[string]string{"ACCESS_MODE": "write-shared"}})
	const each = 200
	done := make(chan error)
	for i := range uint32(4) {
		s := rig.LoginTo(t, d, "iqn.2026-01.test:"+string('a'+rune(i)))
		go func() {
			for n := range uint32(each) {
				lba := n*4 + i
				if _, err := s.Do(targettest.Write10(1, lba, rig.Block(lba, byte(i)))); err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for range 4 {
		require.NoError(t, <-done)
	}
	s := rig.LoginTo(t, d, "iqn.2026-01.test:reader")
	for lba := range uint32(4 * each) {
		require.Equal(t, rig.Block(lba, byte(lba%4)), rig.Do(t, s, rig.ReadBlock(1, lba)).Data)
	}
}

// TestRefusesToStart: a wrong configuration ends with an exit status and a message that says what
// to do.
func TestRefusesToStart(t *testing.T) {
	t.Parallel()
	rig.Need(t)
	stray := t.TempDir()
	rig.MakeRaw(t, filepath.Join(stray, "disk.raw"), 1<<20)
	require.NoError(t, os.WriteFile(filepath.Join(stray, "zz.txt"), []byte("hello"), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(stray, "odd.img"), make([]byte, 1000), 0o644))
	require.NoError(t, os.Symlink("/etc/passwd", filepath.Join(stray, "link.raw")))
	good := rig.DiskDir(t, 1<<20)
	empty := t.TempDir()
	for _, c := range []struct {
		name   string
		config rig.Config
		status int
		says   []string
	}{
		{"no image", rig.Config{DiskDir: empty}, 1, []string{empty}},
		{"no directory", rig.Config{DiskDir: empty + "/missing"}, 1, []string{empty + "/missing"}},
		{"stray files", rig.Config{DiskDir: stray}, 1, []string{"zz.txt", "odd.img", "link.raw"}},
		{"half a credential",
			rig.Config{DiskDir: good, Env: map[string]string{"CHAP_USERNAME": rig.User}}, 2,
			[]string{"CHAP_USERNAME", "CHAP_PASSWORD"}},
		{"short secret", rig.Config{DiskDir: good,
			Env: map[string]string{"CHAP_USERNAME": rig.User, "CHAP_PASSWORD": "short"}}, 2,
			[]string{"12"}},
		{"open to the world", rig.Config{DiskDir: good,
			Env: map[string]string{"LISTEN": "0.0.0.0:0"}},
			2, []string{"insecure-no-auth"}},
		{"unknown copy mode", rig.Config{DiskDir: good, Env: map[string]string{"COPY_MODE": "cow"}},
			2,
			[]string{"copy-on-write"}},
		{"persistent directory",
			rig.Config{DiskDir: good, Env: map[string]string{"PERSISTENT_DIR": "/proc/volume"}}, 1,
			[]string{"persistent", "/proc/volume", "does not exist", "PERSISTENT_DIR"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			status, output := rig.Refused(t, c.config)
			require.Equal(t, c.status, status, output)
			for _, s := range c.says {
				require.Contains(t, output, s)
			}
		})
	}
}
