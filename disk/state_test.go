package disk

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/internal/slots"
)

func exampleState() *state {
	return &state{Version: stateVersion, Image: "disk.raw", Mode: CopyClone, Size: 1 << 20, ImageSize: 1 << 20, Identity: newIdentity(),
		Created: time.Unix(1e9, 0).UTC(), Boot: "b", Map: strings.Repeat("0a", 16), Chain: []fileFingerprint{{Name: "disk.raw", Format: FormatRaw, Size: 1 << 20, Hash: "0"}}}
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

	require.NoError(t, os.Truncate(path, maxSmall+1))
	var damaged *damagedError
	_, err = loadState(path)
	require.ErrorAs(t, err, &damaged)
}

// Every single bit of the file counts.
func TestStateDamageIsNoticed(t *testing.T) {
	want := exampleState()
	path := filepath.Join(t.TempDir(), stateName)
	require.NoError(t, want.save(path, false))
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	for i := range len(text) * 8 {
		flipped := append([]byte(nil), text...)
		flipped[i/8] ^= 1 << (i % 8)
		if got, err := decodeState(flipped); err == nil {
			require.Equal(t, want, got, "bit %d", i) // a space or the case of a key, which JSON does not mind
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
		"long":   func(s *state) { s.Identity.Serial = string(block('s', 37)) },
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

func TestIdentitiesAreUnique(t *testing.T) {
	seen := make(map[string]bool)
	naa := make(map[[8]byte]bool)
	for range 10000 {
		id := newIdentity()
		require.False(t, seen[id.Serial] || naa[id.NAA])
		seen[id.Serial], naa[id.NAA] = true, true
		require.Equal(t, byte(3), id.NAA[0]>>4)
		require.Regexp(t, `^[0-9a-f]{20}$`, id.Serial)
	}
}

func TestFingerprintDoesNotDependOnHoles(t *testing.T) {
	dir := t.TempDir()
	content := append(block(1, 4096), make([]byte, 5<<20)...)
	full := openImage(t, put(t, dir, "full.raw", content, 0))
	sparse := openImage(t, put(t, dir, "sparse.raw", content[:4096], int64(len(content))))
	a, err := full.fingerprint(t.Context(), full.contents(nil), slots.New(2, slots.Options{}))
	require.NoError(t, err)
	b, err := sparse.fingerprint(t.Context(), sparse.contents(nil), slots.New(2, slots.Options{}))
	require.NoError(t, err)
	require.Equal(t, a[0].Hash, b[0].Hash)

	// The same chunks in another place are another image.
	shifted := append(make([]byte, 2<<20), content[:len(content)-2<<20]...)
	other := openImage(t, put(t, dir, "shifted.raw", shifted, 0))
	c, err := other.fingerprint(t.Context(), other.contents(nil), slots.New(2, slots.Options{}))
	require.NoError(t, err)
	require.NotEqual(t, a[0].Hash, c[0].Hash)
}

func TestImageChangedWhileItWasRead(t *testing.T) {
	path := put(t, t.TempDir(), "disk.raw", []byte("data"), 1<<20)
	img := openImage(t, path)
	require.NoError(t, img.checkUntouched())
	require.NoError(t, os.Chtimes(path, time.Unix(1, 0), time.Unix(1, 0)))
	require.ErrorContains(t, img.checkUntouched(), `"disk.raw" was changed`)
	_, err := Open(t.Context(), img, OpenOptions{WorkDir: t.TempDir()})
	require.ErrorContains(t, err, "was changed while it was read")
}

// Two images of one size in read-only file systems, both built in a reproducible way, look the same, but for their content.
func TestTimesOfArchivesAreNotRelied(t *testing.T) {
	changed := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC).UnixNano()
	print := fileFingerprint{Name: "disk.raw", Format: FormatRaw, Size: 1 << 20, Hash: "0123456789abcdef", Dev: 1, Ino: 2, MTime: 3, CTime: changed}
	now := print
	now.Hash = ""
	require.True(t, now.untouched(&print), "the kernel tells of every change")
	now.CTime++
	require.False(t, now.untouched(&print), "the other time can be set back")
	now.CTime--
	print.CTime, now.CTime = changed/1e9*1e9, changed/1e9*1e9
	require.False(t, now.untouched(&print), "the content decides")
	print.Hash = ""
	require.True(t, now.untouched(&print), "there is nothing better to go by")

	dir := t.TempDir()
	img := openImage(t, put(t, dir, "disk.raw", block(1, 1<<20), 0))
	old, err := img.fingerprint(t.Context(), img.contents(nil), slots.New(2, slots.Options{}))
	require.NoError(t, err)
	img.top.stat.Ctim.Nsec, old[0].CTime = 0, old[0].CTime/1e9*1e9
	reason, same, err := img.compareImage(t.Context(), old)
	require.NoError(t, err)
	require.Empty(t, reason)
	require.Equal(t, old, same, "it is read, and is the same")
	old[0].Hash = "0123456789abcdef"
	reason, _, err = img.compareImage(t.Context(), old)
	require.NoError(t, err)
	require.Contains(t, reason, "\"disk.raw\" is another one, of the same size")
}

func FuzzState(f *testing.F) {
	body, err := json.Marshal(exampleState())
	require.NoError(f, err)
	text, err := json.Marshal(sealed{Checksum: checksum(body), Body: body})
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
			if text, err = json.Marshal(sealed{Checksum: checksum(text), Body: text}); err != nil {
				return
			}
		}
		s, err := decodeState(text)
		if err != nil {
			return
		}
		if s.Size <= 0 || s.Size%SectorSize != 0 || s.Identity.NAA[0]>>4 != 3 {
			t.Fatalf("accepted %+v", s)
		}
	})
}
