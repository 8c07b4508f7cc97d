package volume

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// TestStorageIsMissingAtAStart: an empty mount point is not the storage of a volume. Nothing is
// made there, the volume has failed with its reason, and it goes on by itself when its storage is
// back.
func TestStorageIsMissingAtAStart(t *testing.T) {
	claim := func(s api.Spec) api.Spec { s.PVC = &api.Claim{Name: "there"}; return s }
	fast := func(s api.Spec) api.Spec { s.Copy = &api.Copy{UsageType: "there"}; return s }
	remote := api.Spec{From: &api.Source{Reference: "registry.example/a:1"}}
	for name, test := range map[string]struct {
		spec  api.Spec
		state api.State
	}{
		"ready on a claim":               {claim(api.Spec{Size: 512}), api.StateReady},
		"uploaded to a claim":            {claim(upload), api.StateReady},
		"filled on a claim":              {claim(api.Spec{Size: 512}), api.StateFilling},
		"fetched to a claim":             {claim(remote), api.StateFilling},
		"fetched to a usage type":        {fast(remote), api.StateFilling},
		"fetched to the one directory":   {remote, api.StateFilling},
		"not begun in a usage type":      {fast(remote), ""},
		"not begun on a claim":           {claim(remote), ""},
		"not begun in the one directory": {remote, ""},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, dir, above := t.Context(), t.TempDir(), t.TempDir()
			there, away := filepath.Join(above, "there"), filepath.Join(above, "away")
			require.NoError(t, os.Mkdir(there, 0o700))
			f := newFake()
			f.claims, f.single = map[string]string{"there": there}, there
			if test.state == api.StateFilling && test.spec.PVC != nil {
				f.whole = make(chan struct{})
			}
			if test.state != api.StateReady && test.spec.From != nil {
				f.slow = make(chan struct{})
			}
			m := start(t, dir, f)
			m.timeout = time.Millisecond
			made := put(t, m, api.DefaultName, test.spec)
			if test.spec.From != nil && test.spec.From.Upload {
				fill := filling(t, m, api.DefaultName)
				disk := filepath.Join(there, diskName)
				require.NoError(t, os.WriteFile(disk, make([]byte, 512), 0o600))
				require.NoError(t, fill.Complete(ctx, ""))
				fill.Release()
			} else if test.state != "" {
				require.Equal(t, test.state, made.State)
			}
			require.NoError(t, m.Close())

			require.NoError(t, os.Rename(there, away))
			require.NoError(t, os.Mkdir(there, 0o700))
			f.served, f.slow, f.whole = map[uint16]string{}, nil, nil
			m, err := New(Options{Dir: dir, Disks: f})
			require.NoError(t, err)
			t.Cleanup(func() { _ = m.Close() })
			m.missingPoll = tick
			require.NoError(t, m.Load(ctx))
			time.Sleep(5 * tick)
			v := get(t, m, api.DefaultName)
			require.Equal(t, api.StateFailed, v.State)
			require.Contains(t, v.Failure, "is missing: mount its storage")
			_, _, err = m.Put(ctx, api.DefaultName, test.spec)
			require.ErrorContains(t, err, "is missing: mount its storage")
			require.Empty(t, testtool.Must(os.ReadDir(there))(t))

			require.NoError(t, os.Remove(there))
			require.NoError(t, os.Rename(away, there))
			testtool.Eventually(t, func() bool {
				v, err := m.Get(api.DefaultName)
				return err == nil && v.State == api.StateReady
			})
			testtool.Eventually(t, func() bool { // a moment after the record
				_, err := os.Stat(filepath.Join(there, markName))
				return os.IsNotExist(err)
			})
		})
	}
}

// TestFetchFailsWhenStorageIsBack: when the storage of a volume has come back, and its image cannot
// be fetched then, the volume says so, and is tried again when it is put.
func TestFetchFailsWhenStorageIsBack(t *testing.T) {
	dir, there, f := t.TempDir(), filepath.Join(t.TempDir(), "there"), newFake()
	require.NoError(t, os.Mkdir(there, 0o700))
	f.claims, f.slow = map[string]string{"there": there}, make(chan struct{})
	m := start(t, dir, f)
	m.timeout = time.Millisecond
	spec := api.Spec{From: &api.Source{Reference: "registry.example/a:1"},
		Copy: &api.Copy{UsageType: "there"}}
	put(t, m, "vm1", spec)
	require.NoError(t, m.Close())
	require.NoError(t, os.Rename(there, there+".away"))
	f.set(func() { f.slow, f.opening = nil, func() error { return errFake } })
	m = testtool.Must(New(Options{Dir: dir, Disks: f}))(t)
	t.Cleanup(func() { _ = m.Close() })
	m.missingPoll, m.timeout = tick, testtool.Timeout
	require.NoError(t, m.Load(t.Context()))
	require.NoError(t, os.Rename(there+".away", there))
	testtool.Eventually(t, func() bool {
		return strings.Contains(get(t, m, "vm1").Failure, errFake.Error())
	})
	f.set(func() { f.opening = nil })
	require.Equal(t, api.StateReady, put(t, m, "vm1", spec).State)
}

// TestOpeningFailsWhenStorageIsBack: a volume whose storage has come back, and whose disk cannot be
// opened yet, says why, and not that its storage is missing. It is tried again by itself.
func TestOpeningFailsWhenStorageIsBack(t *testing.T) {
	dir, there, f := t.TempDir(), filepath.Join(t.TempDir(), "there"), newFake()
	require.NoError(t, os.Mkdir(there, 0o700))
	f.claims = map[string]string{"there": there}
	m := start(t, dir, f)
	put(t, m, "vm1", api.Spec{Size: 512, Copy: &api.Copy{UsageType: "there"}})
	require.NoError(t, m.Close())
	require.NoError(t, os.Rename(there, there+".away"))
	m = testtool.Must(New(Options{Dir: dir, Disks: f}))(t)
	t.Cleanup(func() { _ = m.Close() })
	m.missingPoll = tick
	require.NoError(t, m.Load(t.Context()))
	f.set(func() { f.opening = func() error { return errFake } })
	require.NoError(t, os.Rename(there+".away", there))
	testtool.Eventually(t, func() bool {
		return strings.Contains(get(t, m, "vm1").Failure, errFake.Error()+"; this is tried again")
	})
	f.set(func() { f.opening = nil })
	testtool.Eventually(t, func() bool { return get(t, m, "vm1").State == api.StateReady })
}

// TestUploadToMissingStorage: no upload goes to an empty mount point.
func TestUploadToMissingStorage(t *testing.T) {
	for name, spec := range map[string]api.Spec{
		"claim":      {From: upload.From, PVC: &api.Claim{Name: "there"}},
		"usage type": {From: upload.From, Copy: &api.Copy{UsageType: "there"}},
	} {
		t.Run(name, func(t *testing.T) {
			there, f := filepath.Join(t.TempDir(), "there"), newFake()
			require.NoError(t, os.Mkdir(there, 0o700))
			f.claims = map[string]string{"there": there}
			m := start(t, t.TempDir(), f)
			put(t, m, "vm1", spec)
			require.NoError(t, os.Rename(there, there+".away"))
			require.NoError(t, os.Mkdir(there, 0o700))
			_, _, err := m.Fill(t.Context(), "vm1", true)
			require.ErrorContains(t, err, "is missing: mount its storage")
			require.NoError(t, os.Remove(there))
			require.NoError(t, os.Rename(there+".away", there))
			fill, made := testtool.Must2(m.Fill(t.Context(), "vm1", true))(t)
			require.False(t, made)
			fill.Release()
			require.NoError(t, m.Delete(t.Context(), "vm1", false))
			require.False(t, m.Has(store.Place{Kind: store.PlaceClaim, Name: "there"}))
			require.Empty(t, testtool.Must(diskFiles(there))(t))
		})
	}
}

// TestFillMakesItsVolume: an upload that makes its volume fills that volume, also if others delete
// and make volumes of the name at the same time.
func TestFillMakesItsVolume(t *testing.T) {
	m := start(t, t.TempDir(), newFake())
	ctx := t.Context()
	done, stop := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				_ = m.Delete(ctx, "vm1", false)
			}
		}
	}()
	for range 200 {
		fill, made, err := m.Fill(ctx, "vm1", true)
		require.NoError(t, err, "nobody takes the volume from the upload that made it")
		require.True(t, made)
		require.NoError(t, fill.Undo(ctx))
	}
	close(stop)
	<-done
	require.Empty(t, m.List())
	_, _, err := m.Fill(ctx, "../vm1", true)
	refused(t, api.CodeInvalid, err)
	_, _, err = m.Fill(ctx, "../vm1", false)
	refused(t, api.CodeNotFound, err)
}

// TestSomebodyElseIsFirst: another server makes a disk in the place of a new volume, after the
// volume has got its record. The disk stays, after a kill, too.
func TestSomebodyElseIsFirst(t *testing.T) {
	for name, test := range map[string]struct {
		spec api.Spec
		file string // that is made
	}{
		"usage type":         {api.Spec{Copy: &api.Copy{UsageType: "there"}}, diskName},
		"claim":              {api.Spec{PVC: &api.Claim{Name: "there"}}, diskName},
		"claim, soon":        {api.Spec{PVC: &api.Claim{Name: "there"}}, markName},
		"the one directory":  {api.Spec{}, diskName},
		"that one, and soon": {api.Spec{}, markName},
	} {
		for _, killed := range []bool{false, true} {
			f, there := newFake(), t.TempDir()
			f.claims, f.single = map[string]string{"there": there}, there
			m := start(t, t.TempDir(), f)
			test.spec.Size = 512
			spec := testtool.Must(test.spec.Resolved())(t)
			v := testtool.Must(m.takeTurn(t.Context(), api.DefaultName))(t)
			r := store.Record{Name: v.name, State: store.StateMaking, Size: 512, Spec: spec,
				Place: m.place(v.name, spec)}
			dir := testtool.Must(m.begin(v, &r))(t)
			require.NoError(t, os.MkdirAll(dir, 0o700))
			other := filepath.Join(dir, test.file)
			require.NoError(t, os.WriteFile(other, []byte("keep"), 0o600))
			if !killed {
				refused(t, api.CodeInUse, m.makeDisk(t.Context(), v, r, dir))
				m.undo(v)
			}
			m.release(v)
			m = again(t, m, f)
			require.Empty(t, m.List(), name)
			require.Equal(t, "keep", string(testtool.Must(os.ReadFile(other))(t, name)))
			require.Len(t, testtool.Must(os.ReadDir(dir))(t), 1, name)
		}
	}
}

// TestKilledWithAPlace: whichever step of making a volume a kill follows, the next start leaves
// nothing of it, and the place can be used.
func TestKilledWithAPlace(t *testing.T) {
	for name, spec := range map[string]api.Spec{
		"usage type": {Size: 512, Copy: &api.Copy{UsageType: "there"}},
		"claim":      {Size: 512, PVC: &api.Claim{Name: "there"}},
	} {
		for steps := range 4 {
			f, there := newFake(), t.TempDir()
			f.claims = map[string]string{"there": there}
			m := start(t, t.TempDir(), f)
			resolved := testtool.Must(spec.Resolved())(t)
			v := testtool.Must(m.takeTurn(t.Context(), "vm1"))(t)
			r := store.Record{Name: v.name, State: store.StateMaking, Size: 512, Spec: resolved,
				Place: m.place(v.name, resolved)}
			dir := testtool.Must(m.begin(v, &r))(t)
			if steps > 0 {
				require.NoError(t, m.occupy(r, dir))
			}
			if steps > 1 {
				r.Unmade, r.Marked = false, r.Place.Kind == store.PlaceClaim
				require.NoError(t, m.set(v, r))
			}
			if steps > 2 {
				disk := filepath.Join(dir, diskName)
				require.NoError(t, os.WriteFile(disk, nil, 0o600))
			}
			m.release(v)
			m = again(t, m, f)
			require.Empty(t, m.List(), name)
			require.Empty(t, testtool.Must(diskFiles(there))(t), name, steps)
			require.NoDirExists(t, filepath.Join(there, ".volumes", m.store.ID(), "vm1"))
			require.Equal(t, api.StateReady, put(t, m, "vm1", spec).State)
		}
	}
}

// TestPlaceThatIsNotNoted: what was made in a place goes with the volume if its record cannot be
// saved then.
func TestPlaceThatIsNotNoted(t *testing.T) {
	for name, spec := range map[string]api.Spec{
		"usage type": {Size: 512, Copy: &api.Copy{UsageType: "there"}},
		"claim":      {Size: 512, PVC: &api.Claim{Name: "there"}},
	} {
		f, there := newFake(), t.TempDir()
		f.claims = map[string]string{"there": there}
		m := start(t, t.TempDir(), f)
		unsure(m, 0)
		_, _, err := m.Put(t.Context(), "vm1", spec)
		refused(t, api.CodeFailed, err)
		require.Empty(t, testtool.Must(diskFiles(there))(t), name)
		require.Equal(t, api.StateReady, put(t, m, "vm1", spec).State)
	}
}
