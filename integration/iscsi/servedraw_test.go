package iscsi

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/targettest"
)

// TestGuestDoesNotDecideWhatItsDiskIs: a guest writes the signature of another format to a disk
// that is served in place. After kill -9, in another container, the disk must have the guest's
// data, in every copy mode. The other disk must be served, too.
func TestGuestDoesNotDecideWhatItsDiskIs(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img")
	const size, blocks = 8 << 20, 8 << 20 / 512
	overlay := filepath.Join(t.TempDir(), "top.qcow2")
	rig.OK(t, "qemu-img", "create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", "secret.raw",
		overlay, "8M")
	header := testtool.Must(os.ReadFile(overlay))(t)
	for looks, written := range map[string]struct {
		lba  uint32
		data []byte
	}{
		"luks":  {0, []byte("LUKS\xba\xbe\x00\x02")},
		"gzip":  {0, []byte("\x1f\x8b\x08")},
		"vmdk":  {0, []byte("KDMV")},
		"tar":   {0, []byte(strings.Repeat("\x00", 257) + "ustar")},
		"vhd":   {blocks - 1, []byte("conectix")},
		"qcow2": {0, header},
	} {
		t.Run(looks, func(t *testing.T) {
			dir := t.TempDir()
			image, secret := filepath.Join(dir, "guest.raw"), filepath.Join(dir, "secret.raw")
			rig.MakeRawSeed(t, image, size, 1)
			rig.MakeRawSeed(t, secret, size, 2)
			other := testtool.Must(os.ReadFile(secret))(t)
			serve := func(mode string) (*rig.Daemon, *targettest.Session) {
				d := rig.Start(t, rig.Config{DiskDir: dir,
					Env: map[string]string{"COPY_MODE": mode}})
				s := rig.LoginTo(t, d, "iqn.2026-01.test:guest")
				require.NoError(t, testtool.Err(s.ClearAttention(2)))
				return d, s
			}
			d, s := serve("none")
			padded := append(written.data, make([]byte, -len(written.data)&511)...)
			for i := 0; i < len(padded); i += 512 {
				lba := written.lba + uint32(i/512)
				require.True(t, rig.Do(t, s, targettest.Write10(1, lba, padded[i:i+512])).Good())
			}
			d.Crash()
			want := testtool.Must(os.ReadFile(image))(t)
			for _, mode := range []string{"none", "copy-on-write", "clone", "none"} {
				d, s := serve(mode)
				for lba := uint32(0); lba < blocks; lba += 128 {
					at := int(lba) * 512
					got := rig.Do(t, s, targettest.Read10(1, lba, 128)).Data
					require.Equal(t, want[at:at+128*512], got, "%s, block %d", mode, lba)
				}
				require.Equal(t, other[:512], rig.Do(t, s, rig.ReadBlock(2, 0)).Data)
				require.Contains(t, d.Output(), `"looks_like":"`+looks+`"`)
				d.Crash()
			}
		})
	}
}
