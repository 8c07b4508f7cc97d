package instance

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
)

func exampleState() *state {
	return &state{Version: stateVersion, Image: "disk.raw", Mode: CopyClone, Size: 1 << 20,
		ImageSize: 1 << 20, Identity: newIdentity(),
		Created: time.Unix(1e9, 0).UTC(), Boot: "b", Map: strings.Repeat("0a", 16),
		Chain: []image.Fingerprint{{Name: "disk.raw", Format: image.FormatRaw, Size: 1 << 20,
			Hash: "0"}}}
}

// save writes a state that no directory has.
func (s *state) save(path string, synced bool) error {
	return durable.SaveRecord(path, s, nil, syncIf(synced))
}

func TestStateRoundTrip(t *testing.T) {
	path := filepath.Join(t.TempDir(), stateName)
	require.ErrorIs(t, testtool.Err(loadState(path)), os.ErrNotExist)
	want := exampleState()
	require.NoError(t, want.save(path, true))
	require.Equal(t, want, testtool.Must(loadState(path))(t))
	st := testtool.Must(os.Stat(path))(t)
	require.Equal(t, os.FileMode(0o600), st.Mode())

	require.NoError(t, os.Truncate(path, 1<<20+1))
	require.ErrorAs(t, testtool.Err(loadState(path)), new(*durable.DamagedError))
}

func decodeState(text []byte) (*state, error) {
	s := new(state)
	if err := durable.DecodeRecord(text, s, stateVersion, layeredVersion); err != nil {
		return nil, err
	}
	return s, s.check()
}

// TestStateDamageIsNoticed flips every bit of the file.
func TestStateDamageIsNoticed(t *testing.T) {
	want := exampleState()
	path := filepath.Join(t.TempDir(), stateName)
	require.NoError(t, want.save(path, false))
	text := filetest.Content(t, path)
	for i := range len(text) * 8 {
		flipped := append([]byte(nil), text...)
		flipped[i/8] ^= 1 << (i % 8)
		if got, err := decodeState(flipped); err == nil {
			// JSON ignores a space and the case of a key
			require.Equal(t, want, got, "bit %d", i)
		}
	}
	for n := range text[:len(text)-1] {
		require.Error(t, testtool.Err(decodeState(text[:n])), "the first %d bytes", n)
	}
}

func TestStateThatContradictsItself(t *testing.T) {
	for name, change := range map[string]func(*state){
		"size":   func(s *state) { s.Size = 100 },
		"none":   func(s *state) { s.Size = 0 },
		"serial": func(s *state) { s.Identity.Serial = "" },
		"long":   func(s *state) { s.Identity.Serial = string(filetest.Block('s', 37)) },
		"image":  func(s *state) { s.Chain = nil },
		"naa":    func(s *state) { s.Identity.NAA[0] = 0x50 },
	} {
		s := exampleState()
		change(s)
		path := filepath.Join(t.TempDir(), stateName)
		require.NoError(t, s.save(path, false))
		require.ErrorContains(t, testtool.Err(loadState(path)), "damaged", name)
	}
}

func TestImageChangedWhileItWasRead(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "disk.raw", []byte("data"), 1<<20)
	img := openGood(t, path)
	require.NoError(t, img.CheckUntouched())
	require.NoError(t, os.Chtimes(path, time.Unix(1, 0), time.Unix(1, 0)))
	require.ErrorContains(t, img.CheckUntouched(), `"disk.raw" was changed`)
	_, err := Open(t.Context(), img, Options{WorkDir: t.TempDir()})
	require.ErrorContains(t, err, "was changed while it was read")

	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		inst, _ := start(t, path, Options{WorkDir: dir, Mode: CopyOnWrite})
		defer inst.Close()
		says := func(text string) {
			t.Helper()
			time.Sleep(lookEvery + 1)
			require.Contains(t, inst.Wrong(), text)
			require.Equal(t, text == "", inst.Wrong() == "")
		}
		require.NoError(t, os.Chtimes(path, time.Unix(2, 0), time.Unix(2, 0)))
		says("somebody has written to the image")
		require.NoError(t, os.Chtimes(path, time.Unix(1, 0), time.Unix(1, 0)))
		says("")
		require.NoError(t, os.Rename(inst.path, inst.path+".away"))
		says("was moved, replaced or removed")
		require.NoError(t, os.Rename(inst.path+".away", inst.path))
		says("")
	})
}

func FuzzState(f *testing.F) {
	body := testtool.Must(json.Marshal(exampleState()))(f)
	f.Add(testtool.Must(durable.EncodeRecord(exampleState()))(f), false)
	f.Add(body, true) // sealed by the test, so that the fuzzer gets past the checksum
	f.Add([]byte(`{}`), true)
	f.Add([]byte(`null`), true)
	f.Fuzz(func(t *testing.T, text []byte, seal bool) {
		if seal {
			if !json.Valid(text) {
				return
			}
			var err error
			if text, err = durable.EncodeRecord(json.RawMessage(text)); err != nil {
				return
			}
		}
		s, err := decodeState(text)
		if err != nil {
			return
		}
		if s.Size <= 0 || s.Size%disk.SectorSize != 0 || s.Identity.NAA[0]>>4 != 3 {
			t.Fatalf("accepted %+v", s)
		}
	})
}

// TestStoreGoesWithTheDisk: the store of a logical unit belongs to the content of its disk. It
// stays while the disk is kept, under any name, and goes with it.
func TestStoreGoesWithTheDisk(t *testing.T) {
	dir, work := t.TempDir(), t.TempDir()
	path := filetest.Put(t, dir, "disk.raw", filetest.Sample(1<<20, 1), 0)
	opt := Options{WorkDir: work}

	first, _ := start(t, path, opt)
	require.NoError(t, first.Store().Save("mode-pages", []byte("x")))
	require.NoError(t, first.Close())

	opt.Identity.Serial = "another"
	again, _ := start(t, path, opt)
	require.True(t, again.kept)
	require.Equal(t, "x", string(testtool.Must(again.Store().Load("mode-pages"))(t)))
	require.NoError(t, again.Close())

	filetest.Put(t, dir, "disk.raw", filetest.Sample(1<<20, 2), 0)
	other, _ := start(t, path, opt)
	require.False(t, other.kept)
	require.NotEqual(t, filepath.Dir(first.Store().Where("kept")),
		filepath.Dir(other.Store().Where("kept")))
	require.NoDirExists(t, filepath.Dir(first.Store().Where("kept")))
}

func TestStoreIsAsDurableAsTheDisk(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Sample(1<<20, 1), 0)
	for want, opt := range map[bool][]Options{
		true:  {{Durable: true}, {Mode: CopyNone}, {Mode: CopyOnWrite, PersistentDir: t.TempDir()}},
		false: {{}, {Mode: CopyOnWrite}},
	} {
		for _, o := range opt {
			o.WorkDir = t.TempDir()
			inst, _ := start(t, path, o)
			require.Equal(t, want, inst.durable, "%+v", o)
			require.NoError(t, inst.Close())
		}
	}
}

// TestStoreOfAnExchangedFile: the store of an image served in place does not apply to another file
// of its name. An interrupted atomic write would put blocks of one file into the other.
func TestStoreOfAnExchangedFile(t *testing.T) {
	dir := t.TempDir()
	path := filetest.Put(t, dir, "disk.raw", []byte("data"), 1<<20)
	opt := Options{Mode: CopyNone, WorkDir: t.TempDir()}
	first, _ := start(t, path, opt)
	require.False(t, first.kept)
	require.NoError(t, first.Store().Save("kept", []byte("x")))
	require.NoError(t, first.Close())
	for _, readOnly := range []bool{false, true, false} {
		opt.ReadOnly = readOnly
		again, logs := start(t, path, opt)
		require.True(t, again.kept)
		require.Equal(t, "x", string(testtool.Must(again.Store().Load("kept"))(t)))
		require.Empty(t, logs.FilterLevelExact(zap.WarnLevel).All())
		require.NoError(t, again.Close())
	}

	filetest.Put(t, dir, "new.raw", []byte("data"), 1<<20)
	require.NoError(t, os.Rename(filepath.Join(dir, "new.raw"), path))
	for i := range 2 {
		other, logs := start(t, path, opt)
		require.Equal(t, i > 0, other.kept)
		require.Equal(t, first.Identity, other.Identity)
		require.Equal(t, 1-i, logs.FilterMessageSnippet("has changed since").Len())
		require.Empty(t, testtool.Must(other.Store().Load("kept"))(t))
		require.NoDirExists(t, filepath.Dir(first.Store().Where("kept")))
		require.NoError(t, other.Close())
	}
}
