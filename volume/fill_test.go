package volume

import (
	"context"
	"os"
	"path/filepath"
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
	require.NoError(t, m.Close())

	m = start(t, dir, f)
	fill = filling(t, m, "vm1")
	require.NoError(t, os.WriteFile(disk, make([]byte, 1024), 0o600))
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
