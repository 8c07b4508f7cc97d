package served

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/options/optionstest"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/metrics"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// serveKept serves persistent disks of images 1.raw, 2.raw and so on, until the test ends.
func serveKept(t *testing.T, count int) *Disks {
	t.Helper()
	opt := &options.Options{Images: options.Images{Dir: t.TempDir()}, WorkDir: t.TempDir(),
		PersistentDir: t.TempDir(), Portals: []options.Address{optionstest.Loopback()},
		Table: optionstest.Table}
	require.NoError(t, opt.Resolve())
	inUse := serving.New(serving.Config{Log: opt.Log})
	d, err := New(opt, inUse, metrics.New(status.Build{}))
	require.NoError(t, err)
	var found []plan.Disk
	for i := range count {
		path := filepath.Join(opt.Images.Dir, fmt.Sprintf("%d.raw", i+1))
		require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte{1}, 1<<20), 0o644))
		img, err := image.Open(path, image.Options{})
		require.NoError(t, err)
		found = append(found, plan.Disk{Name: filepath.Base(path), Image: img})
	}
	p, err := plan.Make(t.Context(), opt, found, plan.Volumes{})
	require.NoError(t, err)
	require.NoError(t, d.Start(t.Context(), p))
	handovers := control.New(inUse, nil, d, opt.Log)
	require.NoError(t, d.ServeAll(handovers))
	t.Cleanup(func() {
		handovers.Close()
		d.Stop()
		require.NoError(t, d.Close(context.Background(), func() error { return nil }))
	})
	return d
}

// snapshot asks for an action on the snapshot "s" of a disk.
func (d *Disks) snapshot(t *testing.T, disk string, action status.SnapshotAction) error {
	_, err := d.ChangeSnapshots(t.Context(), status.SnapshotRequest{Action: action,
		Disks: []string{disk}, Name: "s"})
	return err
}

// TestAnImageIsOfTheSnapshotThatWasRead: a snapshot that is deleted and made again under its name,
// while an image of it is stored, is not the one that this image has.
func TestAnImageIsOfTheSnapshotThatWasRead(t *testing.T) {
	d := serveKept(t, 1)
	note := func(identity string) error {
		_, err := d.ChangeSnapshots(t.Context(), status.SnapshotRequest{Name: "s",
			Action: status.SnapshotCommitted, Disks: []string{"1.raw"}, Identity: identity,
			Image: "sha256:1/1.raw"})
		return err
	}
	read := func() (c status.Content) {
		of, err := d.OpenContent("1.raw", "s")
		require.NoError(t, err)
		require.NoError(t, of.Close())
		return of.Described
	}
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotCreate))
	old := read()
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotDelete))
	require.NoError(t, d.snapshot(t, "1.raw", status.SnapshotCreate))
	require.ErrorContains(t, note(old.Identity), `the snapshot "s" that was read is not there`)
	require.Error(t, note(""))
	require.Empty(t, read().Committed)
	now := read()
	require.NotEqual(t, old.Identity, now.Identity)
	require.NoError(t, note(now.Identity))
	id := d.table.all()[0].Instance().Snapshots()[0].ID
	require.Equal(t, map[string]string{"sha256:1/1.raw": id}, read().Committed)
	require.NoError(t, instance.TakeSnapshot(t.Context(), "t", d.table.all()[0].Instance()))
}
