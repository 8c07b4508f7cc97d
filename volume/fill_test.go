package volume

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
)

const (
	eventually = time.Minute
	tick       = 10 * time.Millisecond
)

var upload = api.Spec{From: &api.Source{Upload: true}}

func TestFill(t *testing.T) {
	dir, f := t.TempDir(), newFake()
	m := start(t, dir, f)
	ctx := t.Context()
	_, _, err := m.Fill(ctx, "vm1", false)
	refused(t, api.CodeNotFound, err)
	v, created := testtool.Must2(m.Put(ctx, "vm1", upload))(t)
	require.True(t, created)
	require.Equal(t, api.StateAwaiting, v.State)
	require.Empty(t, f.served)

	fill := filling(t, m, "vm1")
	_, _, err = m.Fill(ctx, "vm1", false)
	refused(t, api.CodeBusy, err)
	require.Zero(t, fill.Size())
	refused(t, api.CodeLimit, fill.Reserve(2<<30))
	require.NoError(t, fill.Reserve(1<<30))
	_, _, err = m.Put(ctx, "vm2", api.Spec{Size: 512})
	refused(t, api.CodeLimit, err)
	fill.Progress(10, 1024)
	v = get(t, m, "vm1")
	require.Equal(t, &api.Progress{Received: 10, Total: 1024}, v.Upload)
	refused(t, api.CodeInUse, m.Delete(ctx, "vm1", false))

	// Unusable data leaves the volume as empty as it was.
	disk := fill.Disk()
	for _, name := range []string{disk, fill.Disk() + ".image"} {
		require.NoError(t, os.WriteFile(name, make([]byte, 1024), 0o600))
	}
	f.set(func() { f.opening = func() error { return errFake } })
	require.ErrorIs(t, fill.Complete(ctx, disk+".image"), errFake)
	f.set(func() { f.opening = nil })
	require.Empty(t, testtool.Must(fill.Files())(t))
	entries := testtool.Must(os.ReadDir(filepath.Dir(disk)))(t)
	require.Len(t, entries, 2) // the record, and its spare
	fill.Release()
	fill.Release()

	// A server that stops leaves the data to the next one.
	fill = filling(t, m, "vm1")
	require.NoError(t, os.WriteFile(disk, make([]byte, 1024), 0o600))
	f.set(func() { f.opening = func() error { return errStopping } })
	refused(t, api.CodeUnavailable, fill.Complete(ctx, ""))
	f.set(func() { f.opening = nil })
	require.NoError(t, m.Close())
	refused(t, api.CodeUnavailable, fill.Complete(ctx, ""))
	fill.Release()
	require.FileExists(t, disk)

	m = start(t, dir, f)
	fill = filling(t, m, "vm1")
	require.NoError(t, fill.Complete(ctx, ""))
	fill.Release()
	v = get(t, m, "vm1")
	require.Equal(t, api.StateReady, v.State)
	require.Equal(t, int64(1024), v.Record.Size)
	require.Equal(t, "vm1", f.served[v.Record.LUN])
	_, _, err = m.Fill(ctx, "vm1", false)
	refused(t, api.CodeHasData, err)
	_, created = testtool.Must2(m.Put(ctx, "vm1", upload))(t)
	require.False(t, created)
}

// TestGrowWhileAnUploadEnds: an upload ends whenever its client goes, whoever has the turn of the
// volume. The race detector looks on.
func TestGrowWhileAnUploadEnds(t *testing.T) {
	m := start(t, t.TempDir(), newFake())
	put(t, m, "vm1", upload)
	spec := upload
	for range 2000 {
		fill := filling(t, m, "vm1")
		ended := testtool.Go(func() error { fill.Release(); return nil })
		spec.Size += api.SectorSize
		if _, _, err := m.Put(t.Context(), "vm1", spec); err != nil {
			refused(t, api.CodeBusy, err)
		}
		require.NoError(t, <-ended)
	}
}

// TestUploadedImage: the file is removed when the disk has copied all of it, also after a restart.
func TestUploadedImage(t *testing.T) {
	dir, f := t.TempDir(), newFake()
	m := start(t, dir, f)
	ctx := t.Context()
	f.whole = make(chan struct{})
	put(t, m, "vm1", api.Spec{Size: 4096, From: &api.Source{Upload: true}})
	fill := filling(t, m, "vm1")
	refused(t, api.CodeTooLarge, fill.Reserve(8192))
	image := fill.Disk() + ".image"
	require.NoError(t, os.WriteFile(image, []byte("QFI"), 0o600))
	require.NoError(t, fill.Complete(ctx, image))
	fill.Release()
	require.FileExists(t, image)
	require.NoError(t, m.Close())
	f.served = map[uint16]string{}
	m = start(t, dir, f)
	close(f.whole)
	testtool.Eventually(t, func() bool {
		v, err := m.Get("vm1")
		return err == nil && v.Record.File == ""
	})
	require.NoFileExists(t, image)
}

// TestUploadAndDeletion: an upload that fails, or has received everything, does not wait for the
// deletion that waits for it, and takes nothing from the volume that has the name afterwards.
func TestUploadAndDeletion(t *testing.T) {
	for name, end := range map[string]func(*Upload) error{
		"fails":     func(f *Upload) error { return f.Undo(context.Background()) },
		"completes": func(f *Upload) error { return f.Complete(context.Background(), "") },
	} {
		t.Run(name, func(t *testing.T) {
			m := start(t, t.TempDir(), newFake())
			put(t, m, "vm1", upload)
			fill := filling(t, m, "vm1")
			ended := testtool.Go(func() error {
				<-fill.Context().Done()
				err := end(fill)
				fill.Release()
				return err
			})
			require.NoError(t, m.Delete(t.Context(), "vm1", true))
			_, created := testtool.Must2(m.Put(t.Context(), "vm1", upload))(t)
			require.True(t, created)
			if err := <-ended; name == "completes" {
				refused(t, api.CodeNotFound, err)
			} else {
				require.NoError(t, err)
			}
			require.NoError(t, fill.Undo(t.Context()), "late")
			require.NoError(t, testtool.Err(m.Get("vm1")))
		})
	}
	m := start(t, t.TempDir(), newFake())
	put(t, m, "vm1", upload)
	fill := filling(t, m, "vm1")
	require.NoError(t, fill.Undo(t.Context()))
	require.Empty(t, m.List())
}

// TestUploadLeavesTheMark: an upload to a claim may remove everything that it and a disk have left,
// and not the mark of the volume: without that and a disk, the storage would count as missing.
func TestUploadLeavesTheMark(t *testing.T) {
	f, claim := newFake(), t.TempDir()
	f.claims = map[string]string{"c": claim}
	m := start(t, t.TempDir(), f)
	put(t, m, "vm1", api.Spec{From: upload.From, PVC: &api.Claim{Name: "c"}})
	require.FileExists(t, filepath.Join(claim, markName))
	fill := filling(t, m, "vm1")
	require.NoError(t, os.WriteFile(fill.Disk()+".rest", nil, 0o600))
	files := testtool.Must(fill.Files())(t)
	require.Equal(t, []string{fill.Disk() + ".rest"}, files)
	for _, file := range files {
		require.NoError(t, os.Remove(file))
	}
	fill.Release()
	filling(t, m, "vm1").Release()
}

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
	return testtool.Must(diskFiles(m.store.Dir(name)))(t)
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
