package committed

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

// oneWay is a disk whose first sectors have changed: as many as the name of what they are compared
// with has letters.
type oneWay struct{ disk.Disk }

func (oneWay) Since() []disk.Snapshot { return nil }

func (oneWay) Changed(ctx context.Context, since string, off, _ int64) (bool, int64, error) {
	return off < int64(len(since))*disk.SectorSize, disk.SectorSize, nil
}

func (oneWay) Depth(ctx context.Context, off, _ int64) (int, int64, error) {
	return map[bool]int{true: disk.DepthOwn, false: disk.DepthImage}[off == 0], disk.SectorSize, nil
}

// TestOrigins: each image that has the content of a snapshot is one by what has changed
// since that, unless it has another disk's, and so is the image that the disk reads from.
func TestOrigins(t *testing.T) {
	d := Disk{Name: "vm.qcow2", content: oneWay{}, files: []string{"raw sha256:0"},
		snapshots: map[string]string{"sha256:1/vm.raw": "ab", "sha256:2/vm.raw": "abc",
			"sha256:3/other.raw": "a"}}
	got := map[string]int64{}
	for _, o := range d.origins(t.Context()) {
		n := int64(0)
		for changed := true; changed; n++ {
			var err error
			changed, _, err = o.Changed(n*disk.SectorSize, disk.SectorSize)
			require.NoError(t, err)
		}
		got[o.Digest+strings.Join(o.Files, ",")] = n - 1
	}
	require.Equal(t, map[string]int64{"sha256:1": 2, "sha256:2": 3, "raw sha256:0": 1}, got)
	d.files, d.snapshots = nil, nil
	require.Empty(t, d.origins(t.Context()))
}

// TestOwnSnapshotGoes: after an error, the snapshot is deleted once the last reads have ended. One
// that somebody else has deleted is not called left.
func TestOwnSnapshotGoes(t *testing.T) {
	for refusal, listed := range map[string]string{"somebody uses the snapshot": "commit-1",
		"the disk has no snapshot of that name": "another"} {
		var made string
		deletes := 0
		path := filepath.Join(t.TempDir(), "control.sock")
		daemon := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter,
			r *http.Request) {
			var req status.SnapshotRequest
			_ = json.NewDecoder(r.Body).Decode(&req)
			switch {
			case req.Action == status.SnapshotCreate:
				made = req.Name
				_, _ = io.WriteString(w, "{}")
			case req.Action == status.SnapshotDelete:
				if deletes++; deletes > 1 {
					_, _ = io.WriteString(w, "{}")
					return
				}
				w.WriteHeader(http.StatusConflict)
				_, _ = io.WriteString(w, `{"error":"`+refusal+`"}`)
			case r.URL.Path == status.PathSnapshots:
				name := strings.Replace(listed, "commit-1", made, 1)
				_, _ = io.WriteString(w, `{"snapshots":[{"name":"`+name+`"}]}`)
			default:
				w.WriteHeader(http.StatusConflict)
				_, _ = io.WriteString(w, `{"error":"cannot be read"}`)
			}
		})}
		listener := testtool.Must(net.Listen("unix", path))(t)
		go func() { _ = daemon.Serve(listener) }()
		_, err := OpenOfDaemon(t.Context(), control.Client{Socket: path}, "vm", "",
			func(err error) error { return err })
		require.EqualError(t, err, "cannot be read")
		require.Equal(t, listed == "commit-1", deletes == 2)
		require.NoError(t, daemon.Close())
	}
}

// TestFileOf: the file of a disk is called as the disk.
func TestFileOf(t *testing.T) {
	for name, want := range map[string]string{"vm.qcow2": "vm.raw", "vm.qcow2@before": "vm.raw",
		"registry.example.com/vm/fedora:42": "fedora.raw", "": "disk.raw"} {
		require.Equal(t, want, fileOf(name))
	}
}

// TestHalfAnAtomicWriteIsNotCommitted: a disk that its next start would first repair is no image. A
// snapshot of it is.
func TestHalfAnAtomicWriteIsNotCommitted(t *testing.T) {
	img, dir := filepath.Join(t.TempDir(), "vm.raw"), t.TempDir()
	require.NoError(t, os.WriteFile(img, make([]byte, 1<<20), 0o600))
	inst := testtool.Must(instance.Open(t.Context(), testtool.Must(image.Open(img,
		image.Options{Named: true}))(t), instance.Options{PersistentDir: dir,
		Mode: instance.CopyOnWrite}))(t)
	require.NoError(t, instance.TakeSnapshot(t.Context(), "before", inst))
	require.NoError(t, inst.Store().Save(disk.StoredAtomic, []byte("former")))
	require.NoError(t, inst.Close())
	for snapshot, want := range map[string]string{"": "serve the disk once", "before": ""} {
		d, err := OpenKept(t.Context(), nil, Kept{Dir: dir, Snapshot: snapshot, Below: img})
		if want != "" {
			require.ErrorContains(t, err, want)
			continue
		}
		require.NoError(t, err)
		require.NoError(t, d.Close())
	}
}
