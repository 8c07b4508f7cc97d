package instance

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
)

// TestFullVolumeWithOtherSettings: a disk on a full volume is served even if its state has to
// change.
func TestFullVolumeWithOtherSettings(t *testing.T) {
	volume := filetest.TinyFS(t, "8m")
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(1<<20, 1), 0)
	opt := Options{PersistentDir: volume, Mode: CopyOnWrite}
	inst, _ := start(t, path, opt)
	inst.copies.done.Wait()
	require.NoError(t, inst.Close())
	filetest.Fill(t, volume)
	for _, serial := range []string{"another", "and another"} {
		opt.Identity.Serial = serial
		again, _ := start(t, path, opt)
		require.True(t, again.kept)
		require.NoError(t, again.Close())
		s, err := loadState(again.dir.state())
		require.NoError(t, err)
		require.Equal(t, serial, s.Identity.Serial)
	}
}
