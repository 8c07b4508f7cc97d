package instance

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
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
	_, err := loadState(path)
	require.ErrorIs(t, err, os.ErrNotExist)
	want := exampleState()
	require.NoError(t, want.save(path, true))
	got, err := loadState(path)
	require.NoError(t, err)
	require.Equal(t, want, got)
	st, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), st.Mode())

	require.NoError(t, os.Truncate(path, 1<<20+1))
	_, err = loadState(path)
	require.ErrorAs(t, err, new(*durable.DamagedError))
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
		_, err := decodeState(text[:n])
		require.Error(t, err, "the first %d bytes", n)
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
		_, err := loadState(path)
		require.ErrorContains(t, err, "damaged", name)
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
}

func FuzzState(f *testing.F) {
	body, err := json.Marshal(exampleState())
	require.NoError(f, err)
	text, err := durable.EncodeRecord(exampleState())
	require.NoError(f, err)
	f.Add(text, false)
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
