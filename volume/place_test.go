package volume

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

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
