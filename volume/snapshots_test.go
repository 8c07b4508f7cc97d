package volume

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
)

// TestSnapshots: requests for snapshots can be repeated, and what they name must be there.
func TestSnapshots(t *testing.T) {
	f := newFake()
	f.claims = map[string]string{"c": t.TempDir()}
	m := start(t, t.TempDir(), f)
	for name, spec := range map[string]api.Spec{"v": {Size: 512}, "w": {Size: 512},
		"claim": {Size: 512, PVC: &api.Claim{Name: "c"}},
		"later": {From: &api.Source{Upload: true}}} {
		put(t, m, name, spec)
	}
	names := func(volume string) (all []string) {
		t.Helper()
		found := testtool.Must(m.Snapshots(t.Context(), volume))(t)
		for _, s := range found {
			all = append(all, s.Name)
		}
		return all
	}
	for i := range 2 {
		one, made := testtool.Must2(m.TakeSnapshot(t.Context(), "v", "s1"))(t)
		require.Equal(t, i == 0, made)
		require.Equal(t, "s1", one.Name)
	}
	require.NoError(t, testtool.Err2(m.TakeSnapshot(t.Context(), "v", "s2")))
	require.Equal(t, []string{"s1", "s2"}, names("v"))
	require.Empty(t, names("w"))
	_, _, err := m.TakeSnapshot(t.Context(), "v", "no name")
	refused(t, api.CodeInvalid, err)
	one := testtool.Must(m.Snapshot(t.Context(), "v", "s2"))(t)
	require.Equal(t, "s2", one.Name)

	require.NoError(t, m.Revert(t.Context(), "v", "s1"))
	refused(t, api.CodeNotFound, m.Revert(t.Context(), "v", "s3"))
	_, err = m.Snapshot(t.Context(), "v", "s3")
	refused(t, api.CodeNotFound, err)
	for range 2 {
		require.NoError(t, m.DeleteSnapshot(t.Context(), "v", "s1"))
	}
	require.Equal(t, []string{"s2"}, names("v"))

	for name, code := range map[string]api.Code{"none": api.CodeNotFound,
		"No Name": api.CodeNotFound, "claim": api.CodeInvalid, "later": api.CodeUnavailable} {
		_, _, err := m.TakeSnapshot(t.Context(), name, "s")
		refused(t, code, err)
	}
}
