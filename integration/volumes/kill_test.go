package volumes

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
	volumeclient "kubevirt.io/disk/volume/client"
)

// worker makes, enlarges and deletes one volume again and again, until its daemon is gone.
type worker struct {
	name string
	// the state that must exist: the last answer; nil: no volume. If another request was on its
	// way, its result is allowed, too.
	have    *api.Volume
	pending string // the request that was not answered; "": there is none
	given   *givenLUNs
}

// givenLUNs are the LUNs of all volumes so far.
type givenLUNs struct {
	mu    sync.Mutex
	count int            // guarded by mu
	last  map[uint16]int // guarded by mu; when a LUN was given last
	soon  []string       // guarded by mu; LUNs that came again too soon
}

// apart is how many other volumes are made, at least, before a LUN comes again: all numbers except
// those that restarts skip, and those that no answer named.
const apart = 10

func (g *givenLUNs) add(v api.Volume) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.count++
	if last, again := g.last[v.ISCSI.LUN]; again && g.count-last < apart {
		g.soon = append(g.soon, fmt.Sprintf("LUN %d after %d volumes", v.ISCSI.LUN, g.count-last))
	}
	g.last[v.ISCSI.LUN] = g.count
}

func (g *givenLUNs) made() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.count
}

func (w *worker) run(ctx context.Context, c *volumeclient.Client) {
	w.pending = ""
	for step := 0; ; step++ {
		switch {
		case w.have == nil:
			w.pending = "make"
			v, err := c.Put(ctx, w.name, api.Spec{Size: 1 << 20})
			if err != nil {
				return
			}
			w.have = &v
			w.given.add(v)
		case w.have.Info.Size == 1<<20:
			w.pending = "grow"
			v, err := c.Put(ctx, w.name, api.Spec{Size: 2 << 20})
			if err != nil {
				return
			}
			w.have = &v
		default:
			w.pending = "delete"
			if c.Delete(ctx, w.name, false) != nil {
				return
			}
			w.have = nil
		}
		w.pending = ""
	}
}

// check compares the volumes after a kill with the answers before it.
func (w *worker) check(t *testing.T, now *api.Volume) {
	t.Helper()
	said := fmt.Sprintf("%s: answered %+v, pending %q, is %+v", w.name, w.have, w.pending, now)
	switch {
	case now == nil:
		require.True(t, w.have == nil || w.pending == "delete", said)
	case w.have == nil:
		require.Equal(t, "make", w.pending, said)
		w.given.add(*now)
	default:
		require.Equal(t, w.have.ISCSI.LUN, now.ISCSI.LUN, said)
		require.Equal(t, w.have.Info.Serial, now.Info.Serial, said)
		require.Equal(t, w.have.Info.NAA, now.Info.NAA, said)
		require.True(t, w.have.Info.Size == now.Info.Size || w.pending == "grow", said)
	}
	if now != nil {
		require.Equal(t, api.StateReady, now.Info.State, said)
	}
	w.have = now
}

// TestVolumesAreKilled: wherever the daemon is killed, after the restart each volume exists
// completely or not at all, as in the last answer, and no LUN was given to two volumes.
func TestVolumesAreKilled(t *testing.T) {
	t.Parallel()
	v := startVolumes(t, map[string]string{"LISTEN": rig.FreePortal(t)})
	given := &givenLUNs{last: map[uint16]int{}}
	workers := make([]*worker, 6)
	for i := range workers {
		workers[i] = &worker{name: fmt.Sprintf("vm%d", i), given: given}
	}
	for round := range 10 {
		c := testtool.Must(volumeclient.New(volumeclient.Options{Server: v.base}))(t)
		var all sync.WaitGroup
		for _, w := range workers {
			all.Go(func() { w.run(t.Context(), c) })
		}
		if round == 0 { // on a busy machine, none may be made in the time below
			v.Until("a volume is made", func() bool { return given.made() > 0 })
		}
		time.Sleep(time.Duration(20+rand.IntN(300)) * time.Millisecond) // somewhere in the middle
		v.Crash()
		all.Wait()
		c.Close()
		v.restart(t)
		c = testtool.Must(volumeclient.New(volumeclient.Options{Server: v.base}))(t)
		list := testtool.Must(c.List(t.Context()))(t)
		now, owner := map[string]*api.Volume{}, map[uint16]string{}
		for _, one := range list {
			now[one.Info.Name] = &one
			require.Empty(t, owner[one.ISCSI.LUN], "two volumes have one LUN")
			owner[one.ISCSI.LUN] = one.Info.Name
		}
		for _, w := range workers {
			w.check(t, now[w.name])
		}
		// A volume that does not exist has left nothing, and each other volume has its disk.
		for _, name := range files(t, filepath.Join(v.home, "work", ".volumes")) {
			if dir, _, ok := strings.Cut(name, "/"); ok {
				require.Contains(t, now, dir, name)
			}
		}
		for name, one := range now {
			require.Equal(t, int64(one.Info.Size), rig.FileStat(t,
				filepath.Join(v.home, "work", ".volumes", name, "disk.img")).Size)
		}
		c.Close()
	}
	require.Empty(t, given.soon)
	t.Logf("%d volumes were made", given.count)
}

// TestVolumeStorageIsMissing: a volume whose storage is not there at a start has failed. It is
// never made again, and comes back as it was, by itself, when its storage does.
func TestVolumeStorageIsMissing(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-io", "qemu-img", rig.QEMUISCSI)
	above, images := t.TempDir(), t.TempDir()
	fast := filepath.Join(above, "fast")
	require.NoError(t, os.Mkdir(fast, 0o755))
	rig.OK(t, "qemu-img", "create", "-q", "-f", "qcow2", filepath.Join(images, "a.qcow2"), "8M")
	v := startVolumes(t, map[string]string{"USAGE_TYPES": "fast=" + fast, "DISK_DIR": images})
	for name, spec := range map[string]string{"empty": "size: 8Mi\ncopy: {usage-type: fast}",
		"image": "from: {image: a.qcow2}\ncopy: {usage-type: fast}", "own": "size: 8Mi",
		"stateless": "size: 8Mi"} {
		atDisk(t, volumeURL(v.put(name, spec)), "write -P 0x42 0 1M", "flush")
	}
	names := []string{"empty", "image", "own", "stateless"}
	before := map[string]api.Volume{}
	for _, name := range names {
		testtool.Within(t, rig.Timeout, func() bool {
			before[name] = v.json(http.StatusOK, "GET", "/volume/"+name, "")
			return before[name].Info.State == api.StateReady
		}, "%s is ready: %+v", name, func() any { return before[name] })
	}
	v.Stop()
	own := filepath.Join(v.home, "work", ".volumes", "own", "disk.img")
	state := filepath.Join(v.home, "work", ".volumes", "stateless", "disk.img.state")
	away := map[string]string{fast: filepath.Join(above, "away"), own: own + ".away",
		state: state + ".away"}
	for from, to := range away {
		require.NoError(t, os.Rename(from, to))
	}
	require.NoError(t, os.Mkdir(fast, 0o755))
	v.restart(t)
	for _, name := range names {
		a := v.json(http.StatusOK, "GET", "/volume/"+name, "")
		require.Equal(t, api.StateFailed, a.Info.State, name)
		require.Contains(t, a.Info.Failure, "is missing")
		status, text := v.ask("PUT", "/volume/"+name, "")
		require.Equal(t, http.StatusInternalServerError, status, text)
		require.Contains(t, text, "is missing")
	}
	require.Empty(t, files(t, fast), "nothing is made in its place")
	require.NoFileExists(t, own)
	require.Len(t, v.Status().LUNs, 1, "the image's")

	require.NoError(t, os.Remove(fast))
	for from, to := range away {
		require.NoError(t, os.Rename(to, from))
	}
	for _, name := range names {
		var a api.Volume
		testtool.Within(t, rig.Timeout, func() bool {
			a = v.json(http.StatusOK, "GET", "/volume/"+name, "")
			return a.Info.State == api.StateReady
		}, "%s is ready: %+v", name, func() any { return a })
		require.Equal(t, before[name].ISCSI.LUN, a.ISCSI.LUN)
		require.Equal(t, before[name].Info.Serial, a.Info.Serial)
		atDisk(t, volumeURL(a), "read -P 0x42 0 1M")
	}
}

// TestVolumesOnFullStorage: on full storage a volume can be deleted, and one that cannot be made is
// refused for that reason.
func TestVolumesOnFullStorage(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-io", "qemu-img", rig.QEMUISCSI)
	rig.NeedRoot(t)
	small := t.TempDir()
	rig.MountTmpfs(t, small, "8m")
	v := startVolumes(t, map[string]string{"VOLUMES_DIR": filepath.Join(small, "volumes")})
	kept, gone := v.put("kept", "size: 4Mi"), v.put("gone", "size: 4Mi")
	atDisk(t, volumeURL(kept), "write -P 0x42 0 1M", "flush")
	atDisk(t, volumeURL(gone), "write -P 0x42 0 1M", "flush")
	fill, err := os.Create(filepath.Join(small, "fill"))
	require.NoError(t, err)
	defer fill.Close()
	for err == nil {
		_, err = fill.Write(bytes.Repeat([]byte{1}, 4096))
	}
	status, text := v.ask("PUT", "/volume/new", "size: 4Mi")
	require.Equal(t, http.StatusInsufficientStorage, status, text)
	require.Equal(t, http.StatusNotFound, v.answers("GET", "/volume/new"))
	require.Equal(t, http.StatusNoContent, v.answers("DELETE", "/volume/gone"))
	require.Equal(t, http.StatusNotFound, v.answers("GET", "/volume/gone"))

	// The room that it had is free.
	v.Stop()
	v.restart(t)
	atDisk(t, volumeURL(v.json(http.StatusOK, "GET", "/volume/kept", "")), "read -P 0x42 0 1M",
		"write -P 0x43 1M 512k", "flush", "discard 0 1M")
}
