package volume

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
)

// TestFetch: a request does not wait for an image that takes long to fetch. The fetch goes on after
// a restart. It reports its progress, it can be deleted, and it can be tried again.
func TestFetch(t *testing.T) {
	dir, f := t.TempDir(), newFake()
	f.claims = map[string]string{"c": t.TempDir()}
	open := func() *Manager {
		m := start(t, dir, f)
		m.timeout = time.Millisecond
		return m
	}
	m := open()
	one := api.Spec{Size: 512, From: &api.Source{Reference: "registry/vm/one"}}
	claimed := one
	claimed.PVC = &api.Claim{Name: "c"}
	puts := func(name string, spec api.Spec, created bool, state api.State) {
		t.Helper()
		v, made := testtool.Must2(m.Put(t.Context(), name, spec))(t)
		require.Equal(t, created, made)
		require.Equal(t, state, v.State, v.Failure)
		if state == api.StateFilling {
			require.Equal(t, "for registry/vm/one", v.Waits)
		}
	}
	until := func(name string, state api.State) {
		t.Helper()
		testtool.Eventually(t, func() bool {
			v, err := m.Get(name)
			return err == nil && v.State == state
		})
	}
	f.slow = make(chan struct{})
	puts("quick", api.Spec{Size: 512, From: &api.Source{Upload: true}}, true, api.StateAwaiting)
	for name, spec := range map[string]api.Spec{"one": one, "claimed": claimed, "gone": one} {
		puts(name, spec, true, api.StateFilling)
		puts(name, spec, false, api.StateFilling)
	}
	larger := one
	larger.Size = 1024
	_, _, err := m.Put(t.Context(), "one", larger)
	refused(t, api.CodeBusy, err)
	require.NoError(t, m.Delete(t.Context(), "gone", false))
	require.NoDirExists(t, m.store.Dir("gone"))

	require.NoError(t, m.Close())
	m = open()
	puts("one", one, false, api.StateFilling)
	close(f.slow)
	until("one", api.StateReady)
	until("claimed", api.StateReady)
	puts("one", one, false, api.StateReady)
	f.mu.Lock()
	require.Len(t, f.served, 1)
	f.mu.Unlock()

	// An error in the background is reported later.
	f.set(func() { f.slow, f.opening = make(chan struct{}), func() error { return errFake } })
	puts("bad", one, true, api.StateFilling)
	f.set(func() { close(f.slow) })
	until("bad", api.StateFailed)
	require.Empty(t, filesIn(t, m, "bad"))
	_, _, err = m.Put(t.Context(), "worse", one)
	if err == nil { // it may take longer than the timeout
		until("worse", api.StateFailed)
	}
	f.set(func() { f.opening = nil })
	put(t, m, "bad", one)
	until("bad", api.StateReady)
}

// filesIn returns the files of a volume's disk in the volume's own directory.
func filesIn(t *testing.T, m *Manager, name string) []string {
	t.Helper()
	paths := testtool.Must(diskFiles(m.store.Dir(name)))(t)
	return paths
}

// TestNewQuery: an address is known by its digest. The query of the last request counts from the
// next start on.
func TestNewQuery(t *testing.T) {
	dir, f := t.TempDir(), newFake()
	m := start(t, dir, f)
	at := func(query string) api.Spec {
		return api.Spec{From: &api.Source{URL: "https://h/f?" + query,
			Digest: "sha256:" + strings.Repeat("0", 64)}}
	}
	_, created := testtool.Must2(m.Put(t.Context(), "one", at("old")))(t)
	require.True(t, created)
	_, created = testtool.Must2(m.Put(t.Context(), "one", at("new")))(t)
	require.False(t, created)
	require.NoError(t, m.Close())
	v := testtool.Must(start(t, dir, f).Get("one"))(t)
	require.Equal(t, "https://h/f?new", v.Record.Spec.From.URL)
	other := at("new")
	other.From.Digest = "sha256:" + strings.Repeat("1", 64)
	require.Error(t, testtool.Err2(m.Put(t.Context(), "one", other)))
}
