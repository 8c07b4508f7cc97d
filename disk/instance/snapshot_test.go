package instance

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
)

// layerFiles returns the names of the files that snapshots have made in a disk's directory.
func layerFiles(t *testing.T, inst *Instance) (names []string) {
	t.Helper()
	for _, name := range filetest.Names(t, inst.dir.path) {
		if strings.Contains(name, ".layer") {
			names = append(names, name)
		}
	}
	return names
}

// without deletes all snapshots, and waits until the disk is as if it never had one.
func without(t *testing.T, inst *Instance) {
	t.Helper()
	for _, s := range inst.Snapshots() {
		require.NoError(t, inst.DeleteSnapshot(t.Context(), s.Name))
	}
	testtool.Eventually(t, func() bool { return len(layerFiles(t, inst)) == 0 },
		func() string { return fmt.Sprint(layerFiles(t, inst)) })
}

func contentOf(t *testing.T, inst *Instance, name string) []byte {
	t.Helper()
	s := testtool.Must(inst.OpenSnapshot(name))(t)
	defer s.Close()
	return filetest.ReadAll(t, s, s.Size())
}

// snapshotDisk is a disk with snapshots, and what it must hold.
type snapshotDisk struct {
	t     *testing.T
	r     *rand.Rand
	path  string // of the image
	opt   Options
	inst  *Instance
	model []byte
	snaps map[string][]byte
	named int
}

func (d *snapshotDisk) open() {
	d.inst, _ = start(d.t, d.path, d.opt)
	var names []string
	for _, s := range d.inst.Snapshots() {
		names = append(names, s.Name)
		require.EqualValues(d.t, len(d.snaps[s.Name]), s.Size)
	}
	require.ElementsMatch(d.t, slices.Collect(maps.Keys(d.snaps)), names)
}

func (d *snapshotDisk) compare() {
	d.t.Helper()
	require.EqualValues(d.t, len(d.model), d.inst.Size())
	require.Equal(d.t, -1, filetest.FirstDifference(d.model,
		filetest.ReadAll(d.t, d.inst, d.inst.Size())))
	for name, want := range d.snaps {
		require.Equal(d.t, -1, filetest.FirstDifference(want, contentOf(d.t, d.inst, name)), name)
	}
	d.compareHistory()
}

// operate does one random operation.
func (d *snapshotDisk) operate() {
	t, r := d.t, d.r
	off := r.Int64N(int64(len(d.model))/disk.SectorSize) * disk.SectorSize
	length := min((1+r.Int64N(1<<r.IntN(10)))*disk.SectorSize, int64(len(d.model))-off)
	part := d.model[off : off+length]
	name := ""
	if names := slices.Sorted(maps.Keys(d.snaps)); len(names) > 0 {
		name = names[r.IntN(len(names))]
	}
	switch op := r.IntN(40); {
	case op == 0:
		require.NoError(t, d.inst.Flush())
	case op <= 3:
		clear(part)
		require.NoError(t, d.inst.Disk.(disk.Discarder).Discard(t.Context(), off, length))
	case op == 4:
		clear(part)
		require.NoError(t, d.inst.Disk.(disk.Zeroer).Zero(t.Context(), off, length))
	case op <= 7 && len(d.snaps) < 5:
		d.named++
		name = fmt.Sprintf("s%d", d.named)
		require.NoError(t, TakeSnapshot(t.Context(), name, d.inst))
		d.snaps[name] = filetest.Clone(d.model)
	case op <= 10 && name != "":
		require.NoError(t, d.inst.DeleteSnapshot(t.Context(), name))
		delete(d.snaps, name)
	case op == 11 && name != "":
		require.NoError(t, d.inst.Revert(t.Context(), name))
		clear(d.model[copy(d.model, d.snaps[name]):])
	case op == 12 && len(d.model) < 6<<20:
		grown := int64(len(d.model)) + (1+r.Int64N(200))*disk.SectorSize
		require.NoError(t, d.inst.Grow(grown))
		d.model = append(d.model, make([]byte, grown-int64(len(d.model)))...)
	case op == 13:
		d.compare()
	case op == 14 && r.IntN(3) == 0:
		require.NoError(t, d.inst.Close())
		d.open()
		d.compare()
	case op <= 18:
		p := filetest.Read(t, d.inst, off, length)
		require.True(t, bytes.Equal(part, p), "%d bytes at %d", length, off)
	default:
		disktest.Fill(part, r)
		filetest.Write(t, d.inst, part, off)
	}
}

// TestSnapshots does random operations while layers are merged in the background, and compares the
// disk and all of its snapshots with models. At the end the disk is as if it never had one.
func TestSnapshots(t *testing.T) {
	content := filetest.Sample(3<<20+512, 5)
	path := filetest.Put(t, t.TempDir(), "disk.raw", content, 0)
	for _, mode := range []CopyMode{CopyOnWrite, CopyOnRead, CopyClone} {
		for _, kind := range []string{"ephemeral", "persistent"} {
			t.Run(string(mode)+"/"+kind, func(t *testing.T) {
				t.Parallel()
				for seed := range uint64(testtool.Rounds(2, 200)) {
					d := &snapshotDisk{t: t, r: rand.New(rand.NewPCG(seed, 1)), path: path,
						opt:   killOptions(filepath.Join(t.TempDir(), kind), string(mode)),
						model: filetest.Clone(content), snaps: map[string][]byte{}}
					d.open()
					for range 150 {
						d.operate()
					}
					d.compare()
					without(t, d.inst)
					clear(d.snaps)
					d.compare()
					require.NoError(t, d.inst.Close())
					d.open()
					d.compare()
					require.NoError(t, d.inst.Close())
				}
			})
		}
	}
}

// TestSnapshotOfSeveralDisks: a snapshot of two disks is one point in time of both, while each of
// many writers writes a number to one and then to the other.
func TestSnapshotOfSeveralDisks(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Sample(1<<20, 5), 0)
	var disks []*Instance
	for range 2 {
		inst, _ := start(t, path, Options{WorkDir: t.TempDir()})
		disks = append(disks, inst)
	}
	const writers = 8
	var acknowledged [writers]atomic.Uint64 // by both disks
	stop := make(chan struct{})
	var group sync.WaitGroup
	defer group.Wait()
	defer func() { close(stop) }()
	for w := range writers {
		group.Go(func() {
			p := make([]byte, disk.SectorSize)
			for n := uint64(1); ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				binary.LittleEndian.PutUint64(p, n)
				for _, d := range disks {
					if _, err := d.WriteAt(t.Context(), p, int64(w)*disk.SectorSize*3); err != nil {
						t.Error(err)
						return
					}
				}
				acknowledged[w].Store(n)
			}
		})
	}
	number := func(content []byte, w int) uint64 {
		return binary.LittleEndian.Uint64(content[w*disk.SectorSize*3:])
	}
	for w := range writers {
		testtool.Eventually(t, func() bool { return acknowledged[w].Load() > 10 })
	}
	for round := range testtool.Rounds(20, 1000) {
		name := fmt.Sprintf("s%d", round)
		var before, after [writers]uint64
		for w := range writers {
			before[w] = acknowledged[w].Load()
		}
		require.NoError(t, TakeSnapshot(t.Context(), name, disks[round%2], disks[1-round%2]))
		for w := range writers {
			after[w] = acknowledged[w].Load() + 1
		}
		first, second := contentOf(t, disks[0], name), contentOf(t, disks[1], name)
		for w := range writers {
			a, b := number(first, w), number(second, w)
			require.True(t, a == b || a == b+1, "one disk has write %d, the other %d", a, b)
			require.GreaterOrEqual(t, b, before[w], "it was acknowledged before")
			require.LessOrEqual(t, a, after[w])
		}
		for _, d := range disks {
			if round > 3 {
				require.NoError(t, d.DeleteSnapshot(t.Context(), fmt.Sprintf("s%d", round-3)))
			}
		}
	}
}

// TestSnapshotRefusals: what cannot be done says why, and changes nothing.
func TestSnapshotRefusals(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Sample(1<<20, 5), 0)
	inst, _ := start(t, path, Options{WorkDir: t.TempDir()})
	for _, name := range []string{"", ".a", "-a", "a/b", "a b", "ä", strings.Repeat("a", 64)} {
		require.ErrorContains(t, TakeSnapshot(t.Context(), name, inst), "the name is not valid")
	}
	longest := strings.Repeat("a", 63)
	require.NoError(t, TakeSnapshot(t.Context(), longest, inst))
	before := layerFiles(t, inst)
	var refused *SnapshotError
	for _, err := range []error{TakeSnapshot(t.Context(), longest, inst)} {
		require.ErrorIs(t, err, ErrSnapshotExists)
		require.ErrorAs(t, err, &refused)
		require.Equal(t, "disk.raw", refused.Disk)
	}
	_, err := inst.OpenSnapshot("b")
	for _, err := range []error{inst.DeleteSnapshot(t.Context(), "b"),
		inst.Revert(t.Context(), "b"), err} {
		require.ErrorIs(t, err, ErrSnapshotMissing)
	}
	open := testtool.Must(inst.OpenSnapshot(longest))(t)
	require.ErrorIs(t, inst.DeleteSnapshot(t.Context(), longest), ErrSnapshotInUse)
	_, err = open.WriteAt(t.Context(), make([]byte, 512), 0)
	require.ErrorIs(t, err, disk.ErrReadOnly)
	require.NoError(t, open.Close())
	require.NoError(t, open.Close())
	require.Equal(t, before, layerFiles(t, inst))

	// one of several disks has it already: the others get none
	other, _ := start(t, path, Options{WorkDir: t.TempDir()})
	require.ErrorIs(t, TakeSnapshot(t.Context(), longest, other, inst), ErrSnapshotExists)
	require.Empty(t, other.Snapshots())
	require.Empty(t, layerFiles(t, other))
	served, _ := start(t, path, Options{WorkDir: t.TempDir(), Mode: CopyNone})
	require.ErrorContains(t, TakeSnapshot(t.Context(), "a", other, served), "use another copy mode")
	require.Empty(t, other.Snapshots())
	require.Empty(t, served.Snapshots())
	require.NoError(t, inst.DeleteSnapshot(t.Context(), longest))
	without(t, inst)
}

// TestSnapshotsOnAFullVolume: without space there is no snapshot, and nothing has changed. Merging
// waits for space, and the guest goes on meanwhile.
func TestSnapshotsOnAFullVolume(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Sample(1<<20, 5), 0)
	for name, volume := range map[string]string{"tmpfs": filetest.TinyFS(t, "6m"),
		"ext4": smallExt4(t, 8<<20)} {
		t.Run(name, func(t *testing.T) {
			opt := Options{PersistentDir: volume, Mode: CopyOnWrite, Size: 3 << 20}
			inst, _ := start(t, path, opt)
			inst.copies.done.Wait()
			write := func(b byte) {
				filetest.Write(t, inst, filetest.Block(b, 1<<20), 0)
			}
			write('a')
			require.NoError(t, TakeSnapshot(t.Context(), "first", inst))
			filetest.Write(t, inst, filetest.Block('c', 1<<20), 1<<20)
			more, free := filetest.Fill(t, volume)
			before := layerFiles(t, inst)
			err := TakeSnapshot(t.Context(), "second", inst)
			require.ErrorIs(t, err, disk.ErrNoSpace)
			require.ErrorContains(t, err, "no space is left")
			require.Len(t, inst.Snapshots(), 1)
			require.Equal(t, before, layerFiles(t, inst))

			require.NoError(t, inst.DeleteSnapshot(t.Context(), "first"))
			more()
			require.NoError(t, inst.Close())
			inst, _ = start(t, path, opt)
			require.Empty(t, inst.Snapshots(), "it is gone for good")
			_, err = inst.WriteAt(t.Context(), filetest.Block('d', 4096), 1<<20)
			require.NoError(t, err, "this part has its space")
			free()
			testtool.Eventually(t, func() bool { return len(layerFiles(t, inst)) == 0 })
			want := append(filetest.Block('a', 1<<20), filetest.Block('c', 1<<20)...)
			copy(want[1<<20:], filetest.Block('d', 4096))
			require.Equal(t, -1, filetest.FirstDifference(want,
				filetest.ReadAll(t, inst, int64(len(want)))))
			require.NoError(t, inst.Close())
		})
	}
}

// TestDamagedLayers: a persistent disk whose layers cannot be read is left alone, and an ephemeral
// one is made again, unless what was written is to be kept.
func TestDamagedLayers(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Sample(1<<20, 5), 0)
	layerOf := func(inst *Instance) string {
		s := stateOf(t, inst)
		return inst.dir.layer(testtool.Must(inst.dir.loadLayers(s))(t).Top)
	}
	for name, damage := range map[string]func(inst *Instance) error{
		"record": func(inst *Instance) error {
			return os.WriteFile(inst.dir.layers(), []byte("{}"), 0)
		},
		"no record": func(inst *Instance) error { return os.Remove(inst.dir.layers()) },
		"layer":     func(inst *Instance) error { return os.Remove(layerOf(inst)) },
		"short":     func(inst *Instance) error { return os.Truncate(layerOf(inst), 512) },
		"maps": func(inst *Instance) error {
			return os.Remove(layerOf(inst) + image.MapSuffixes[0])
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, opt := range []Options{{WorkDir: t.TempDir()}, {PersistentDir: t.TempDir()}} {
				inst, _ := start(t, path, opt)
				settle(t, inst)
				require.NoError(t, TakeSnapshot(t.Context(), "a", inst))
				filetest.Write(t, inst, filetest.Block('w', 4096), 0)
				require.NoError(t, inst.Flush())
				require.NoError(t, inst.Close())
				layers := layerFiles(t, inst)
				require.NoError(t, damage(inst))
				if name == "maps" && opt.PersistentDir != "" {
					require.NoError(t, os.Remove(layerOf(inst)+image.MapSuffixes[1]))
				}
				again, err := Open(t.Context(), openGood(t, path), opt)
				if opt.PersistentDir != "" {
					require.Error(t, err)
					require.FileExists(t, inst.dir.disk())
					if name == "no record" {
						require.ErrorContains(t, err, "is missing; put the record back")
						require.Len(t, layerFiles(t, inst), len(layers)-1, "all but the record")
					}
					continue
				}
				require.NoError(t, err)
				require.False(t, again.kept)
				require.Empty(t, again.Snapshots())
				require.Empty(t, layerFiles(t, again))
				require.NoError(t, again.Close())
			}
		})
	}
}

// TestLeftoverLayers: what a killed process has left is removed, and a disk that is set aside takes
// its layers along.
func TestLeftoverLayers(t *testing.T) {
	content := filetest.Sample(1<<20, 5)
	path := filetest.Put(t, t.TempDir(), "disk.raw", content, 0)
	opt := Options{WorkDir: t.TempDir(), Leftovers: LeftoversKeep}
	inst, _ := start(t, path, opt)
	settle(t, inst)
	require.NoError(t, TakeSnapshot(t.Context(), "a", inst))
	filetest.Write(t, inst, filetest.Block('w', 4096), 0)
	require.NoError(t, inst.Close())
	_, err := image.Open(inst.dir.disk(), image.Options{})
	require.ErrorContains(t, err, "delete the snapshots first")
	stray := inst.dir.layer(strings.Repeat("0", 32))
	for _, name := range []string{stray, stray + ".live", stray + ".map.partial"} {
		require.NoError(t, os.WriteFile(name, nil, 0o600))
	}
	moved(t, path, filetest.Sample(1<<20, 6)) // another image of that name
	other, _ := start(t, path, opt)
	require.Empty(t, other.Snapshots())
	require.Empty(t, layerFiles(t, other))
	require.NoError(t, other.Close())
	moved(t, path, content)
	back, _ := start(t, path, opt)
	require.Len(t, back.Snapshots(), 1)
	require.Equal(t, -1, filetest.FirstDifference(content, contentOf(t, back, "a")))
	require.Equal(t, filetest.Block('w', 4096), filetest.ReadAll(t, back, 4096))
	for _, name := range []string{stray, stray + ".live", stray + ".map.partial"} {
		require.ErrorIs(t, testtool.Err(os.Lstat(name)), fs.ErrNotExist)
	}
}

// TestALayerThatCouldNotBeRemoved: a file that stays behind when the last snapshot goes must not
// make the disk look as if it had lost the record of its snapshots.
func TestALayerThatCouldNotBeRemoved(t *testing.T) {
	content := filetest.Sample(1<<20, 5)
	path := filetest.Put(t, t.TempDir(), "disk.raw", content, 0)
	opt := Options{PersistentDir: t.TempDir()}
	inst, _ := start(t, path, opt)
	settle(t, inst)
	require.NoError(t, TakeSnapshot(t.Context(), "a", inst))
	left := inst.dir.layer(strings.Repeat("0", 32))
	require.NoError(t, os.WriteFile(left, nil, 0o600)) // its removal has failed before
	require.NoError(t, inst.DeleteSnapshot(t.Context(), "a"))
	testtool.Eventually(t, func() bool { return !testtool.Must(present(inst.dir.layers()))(t) },
		func() string { return fmt.Sprint(layerFiles(t, inst)) })
	require.NoError(t, inst.Close())
	again, _ := start(t, path, opt)
	require.Equal(t, -1, filetest.FirstDifference(content,
		filetest.ReadAll(t, again, again.Size())))
	require.NoError(t, again.Close())
}
