package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/internal/daemon/served"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target/targettest"
)

const (
	notSupported = "05/25/00"
	lunsChanged  = "06/3F/0E"
)

// laterDisk makes a disk whose image is not in the directory of a daemon.
func laterDisk(t *testing.T, dir, name string) plan.Disk {
	t.Helper()
	path := filepath.Join(dir, name)
	rawImage(t, path, 0xaa)
	return plan.Disk{Name: name, Image: openImage(t, path)}
}

func openImage(t *testing.T, path string) *image.Image {
	t.Helper()
	return testtool.Must(image.Open(path, image.Options{}))(t)
}

// add serves one more disk.
func (r *running) add(disk plan.Disk) (lun uint16, err error) {
	s, err := r.disks.Open(context.Background(), disk)
	if err != nil {
		return 0, err
	}
	if err := r.disks.Serve(s, false); err != nil {
		return 0, errors.Join(err, r.disks.Abandon(s))
	}
	return s.LUN, nil
}

// remove ends a disk.
func (r *running) remove(ctx context.Context, lun uint16) error {
	for _, s := range r.disks.Served() {
		if s.LUN == lun {
			return r.disks.End(ctx, s)
		}
	}
	return fmt.Errorf("there is no LUN %d", lun)
}

// TestAddAndRemove adds a second disk beside one in use, and removes it. When the disk comes back,
// its data is there.
func TestAddAndRemove(t *testing.T) {
	d := start(t, testOptions(t, "a.raw"))
	s := d.login(initiatorA, 1)
	s.MustFail(t, targettest.Read10(2, 0, 1), notSupported)
	dir := t.TempDir()
	added := testtool.Must(d.add(laterDisk(t, dir, "later.raw")))(t)
	require.EqualValues(t, 2, added)
	require.NoError(t, testtool.Err(s.ClearAttention(2)))
	data := bytes.Repeat([]byte{0xee}, 512)
	s.MustGood(t, targettest.Write10(2, 0, data))
	s.MustFail(t, targettest.Read10(1, 0, 1), lunsChanged)

	now := d.Status().LUNs
	require.Len(t, now, 2)
	require.Equal(t, "later.raw", now[1].Image)
	require.True(t, now[1].Ready)
	require.Equal(t, "clone", now[1].CopyMode)
	require.Equal(t, initiatorA, now[1].Owner)
	require.NotEqual(t, now[0].Serial, now[1].Serial)
	require.EqualValues(t, 64<<10, now[1].SizeBytes)
	require.Contains(t, d.page("/metrics"),
		`kubevirt_disk_lun_size_bytes{image="later.raw",lun="2"} 65536`)
	require.Equal(t, 2, d.log.FilterMessage("serving a LUN").Len())

	shared := options.DiskSettings{AccessMode: serving.AccessWriteShared}
	done, _ := testtool.Must2(d.Reload(options.Settings{Disk: shared}))(t)
	require.Equal(t, []string{"a.raw: access-mode"}, done, "the settings are not for it")

	require.NoError(t, d.remove(t.Context(), 2))
	s.MustFail(t, targettest.Read10(2, 0, 1), notSupported)
	require.Len(t, d.Status().LUNs, 1)
	require.NotContains(t, d.page("/metrics"), "later.raw")

	back := plan.Disk{Name: "later.raw", Image: openImage(t, filepath.Join(dir, "later.raw"))}
	back.LUN, back.AccessMode = 9, serving.AccessReadShared
	added = testtool.Must(d.add(back))(t)
	require.EqualValues(t, 9, added)
	require.NoError(t, testtool.Err(s.ClearAttention(9)))
	require.Equal(t, data, s.MustGood(t, targettest.Read10(9, 0, 1)).Data)
	require.True(t, d.Status().LUNs[1].ReadOnly)

	// The first LUN can go too, and so can the last.
	require.NoError(t, d.remove(t.Context(), 1))
	require.NoError(t, testtool.Err2(d.Reload(options.Settings{})))
	require.NoError(t, d.remove(t.Context(), 9))
	require.Empty(t, d.Status().LUNs)
	require.NoError(t, s.Close())
	require.NoError(t, d.end())
	require.ErrorIs(t, testtool.Err(d.add(laterDisk(t, dir, "last.raw"))), served.ErrStopping)
}

// TestAddRefuses checks that Add refuses a disk that cannot be served, and changes nothing.
func TestAddRefuses(t *testing.T) {
	d := start(t, testOptions(t, "a.raw"))
	dir := t.TempDir()
	rawImage(t, filepath.Join(dir, "a.raw"), 1)
	for name, c := range map[string]struct {
		change func(d *plan.Disk)
		want   string
	}{
		"the LUN of another one": {func(d *plan.Disk) { d.LUN = 1 }, `LUN 1 is already used by "a.raw"`},
		"no LUN": {func(d *plan.Disk) { d.LUN = serving.MaxNumber + 1 },
			"LUNs 1 to 16383"},
		"too small": {func(d *plan.Disk) { d.Size = 512 }, "the size of 512 bytes is"},
		"the work directory of another one": {func(d *plan.Disk) {
			_ = d.Image.Close()
			d.Name, d.Image = "a.raw", openImage(t, filepath.Join(dir, "a.raw"))
		}, `the name "a.raw" of a disk is taken by LUN 1`},
	} {
		one := laterDisk(t, dir, "b.raw")
		c.change(&one)
		require.ErrorContains(t, testtool.Err(d.add(one)), c.want, name)
		require.Len(t, d.Status().LUNs, 1, name)
		_, err := one.Image.ReadAt(t.Context(), make([]byte, 512), 0)
		require.Error(t, err, "%s: the image is closed", name)
	}
	// Nothing is left of the refused disks: this one can be served.
	require.NoError(t, testtool.Err(d.add(laterDisk(t, dir, "b.raw"))))
	require.NoError(t, d.end())
}

// TestRemoveThatDoesNotWait: if the caller cannot wait for the disk, the error says so. The disk is
// closed later.
func TestRemoveThatDoesNotWait(t *testing.T) {
	d := start(t, testOptions(t, "a.raw"))
	disk := laterDisk(t, t.TempDir(), "b.raw")
	require.NoError(t, testtool.Err(d.add(disk)))
	impatient, end := context.WithCancel(t.Context())
	end()
	if err := d.remove(impatient, 2); err != nil { // it may have been closed in time
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorContains(t, err, `LUN 2 ("b.raw") is removed, and its disk is closed when`)
	}
	require.NoError(t, d.end(), "which waits for it")
	workers := instance.NewWorkers()
	again := testtool.Must(instance.Open(t.Context(), openImage(t, disk.Image.Path()),
		instance.Options{WorkDir: d.opt.WorkDir, Workers: workers}))(t, "nobody has it")
	require.NoError(t, again.Close())
}

// TestHandoverOfALUNThatGoes: the timer of a handover stops with its LUN. The next disk with that
// number is not handed over when the time would be over.
func TestHandoverOfALUNThatGoes(t *testing.T) {
	d := start(t, testOptions(t, "a.raw"))
	dir := t.TempDir()
	disk := laterDisk(t, dir, "b.raw")
	disk.Dir = filepath.Join(dir, "volume") // so the handover is stored with the disk
	require.NoError(t, testtool.Err(d.add(disk)))
	ask := control.Client{Socket: d.opt.ControlSocket}
	require.NoError(t, testtool.Err(ask.Handover(t.Context(), status.Handover{
		Action: status.ActionOpen, LUN: 2, To: initiatorB, Seconds: 3600})))
	require.NoError(t, d.remove(t.Context(), 2))
	require.NoError(t, testtool.Err(d.add(laterDisk(t, dir, "c.raw"))))
	require.Empty(t, d.Status().LUNs[1].OpenTo)

	const resumed = "the LUN is still open for a handover"
	require.Zero(t, d.log.FilterMessage(resumed).Len())
	back := disk
	back.Image = openImage(t, disk.Image.Path())
	require.EqualValues(t, 3, testtool.Must(d.add(back))(t))
	require.Equal(t, initiatorB, d.Status().LUNs[2].OpenTo)
	require.Equal(t, 1, d.log.FilterMessage(resumed).Len())
	require.NoError(t, d.end())
}

// TestStopWhileLUNsComeAndGo stops the daemon while disks come and go. When Run returns, every disk
// is closed, or the goroutine that adds it closes it.
func TestStopWhileLUNsComeAndGo(t *testing.T) {
	const adders = 4
	for range 5 {
		d := start(t, testOptions(t, "a.raw"))
		dir := t.TempDir()
		var all sync.WaitGroup
		var ready sync.WaitGroup
		ready.Add(adders)
		for i := range adders {
			name := fmt.Sprintf("%d.raw", i)
			rawImage(t, filepath.Join(dir, name), byte(i))
			all.Go(func() {
				first := sync.OnceFunc(ready.Done)
				defer first()
				for {
					img, err := image.Open(filepath.Join(dir, name), image.Options{})
					if err != nil {
						t.Error(err)
						return
					}
					lun, err := d.add(plan.Disk{Name: name, Image: img})
					if err == nil {
						first()
						err = d.remove(context.Background(), lun)
					}
					if err != nil {
						if !errors.Is(err, served.ErrStopping) {
							t.Error(err)
						}
						return
					}
				}
			})
		}
		ready.Wait()
		require.NoError(t, d.end())
		all.Wait()
		workers := instance.NewWorkers()
		for i := range adders {
			img := openImage(t, filepath.Join(dir, fmt.Sprintf("%d.raw", i)))
			inst, err := instance.Open(t.Context(), img,
				instance.Options{WorkDir: d.opt.WorkDir, Workers: workers})
			require.NoError(t, err, "nobody has it any more")
			require.NoError(t, inst.Close())
		}
	}
}

// TestNumbersStayWithTheirImages adds, removes and returns images: a guest finds its disk under the
// same number, wherever disks lie, and the log says what is new.
func TestNumbersStayWithTheirImages(t *testing.T) {
	for name, prepare := range map[string]func(t *testing.T, opt *options.Options){
		"work directory": func(_ *testing.T, opt *options.Options) { opt.WorkDirNamed = true },
		"persistent": func(t *testing.T, opt *options.Options) {
			opt.PersistentDir = t.TempDir()
		},
		"usage type": func(t *testing.T, opt *options.Options) {
			opt.UsageTypes = options.UsageTypes{"fast": t.TempDir()}
			opt.Settings.Disk.UsageType = "fast"
		},
		"in place": func(_ *testing.T, opt *options.Options) {
			opt.WorkDirNamed = true
			opt.Settings.Disk.CopyMode = instance.CopyNone
		},
	} {
		t.Run(name, func(t *testing.T) {
			opt := testOptions(t, "m.raw", "n.raw")
			prepare(t, &opt)
			put := func(name string) {
				rawImage(t, filepath.Join(opt.Images.Dir, name), name[0]-'m'+1)
			}
			remove := func(name string) {
				require.NoError(t, os.Remove(filepath.Join(opt.Images.Dir, name)))
			}
			serve := func(want map[string]uint16) *observer.ObservedLogs {
				t.Helper()
				d := start(t, opt)
				got := map[string]uint16{}
				for _, l := range d.Status().LUNs {
					got[l.Image] = l.LUN
				}
				require.NoError(t, d.end())
				require.Equal(t, want, got)
				return d.log
			}
			logs := serve(map[string]uint16{"m.raw": 1, "n.raw": 2})
			require.Zero(t, logs.FilterMessageSnippet("is new").Len(), "the first start")
			put("a.raw")
			logs = serve(map[string]uint16{"a.raw": 3, "m.raw": 1, "n.raw": 2})
			require.Equal(t, 1, logs.FilterMessageSnippet("is new").Len())
			logs = serve(map[string]uint16{"a.raw": 3, "m.raw": 1, "n.raw": 2})
			require.Zero(t, logs.FilterMessageSnippet("is new").Len())
			// An image that is away for a start keeps its number.
			remove("m.raw")
			put("z.raw")
			logs = serve(map[string]uint16{"a.raw": 3, "n.raw": 2, "z.raw": 4})
			require.Equal(t, 1, logs.FilterMessageSnippet("a LUN is kept").Len())
			d := start(t, opt)
			require.False(t, d.disks.TakeNumber("volume", 1), "nobody new gets it")
			added := testtool.Must(d.disks.Open(t.Context(), plan.Disk{Name: "a.raw@snapshot",
				DiskSettings: options.DiskSettings{ReadOnly: true, CopyMode: instance.CopyNone,
					AccessMode: serving.AccessReadShared},
				AlreadyOpen: instance.WithoutFiles(disktest.NewMemory(1<<20), disk.Identity{}, 512,
					true)}))(t)
			require.EqualValues(t, 5, added.LUN, "nor the one of m.raw")
			require.NoError(t, errors.Join(d.disks.Abandon(added), d.end()))
			put("m.raw")
			put("b.raw")
			serve(map[string]uint16{"a.raw": 3, "b.raw": 5, "m.raw": 1, "n.raw": 2, "z.raw": 4})
			// A setting wins, and stays.
			opt.Settings.Disks = map[string]options.SingleDisk{
				"z.raw": {DiskSettings: opt.Settings.Disk}}
			z := opt.Settings.Disks["z.raw"]
			z.LUN = 9
			opt.Settings.Disks["z.raw"] = z
			logs = serve(map[string]uint16{"a.raw": 3, "b.raw": 5, "m.raw": 1, "n.raw": 2,
				"z.raw": 9})
			require.Equal(t, 1, logs.FilterMessageSnippet("is another one").Len())
			opt.Settings.Disks = nil
			serve(map[string]uint16{"a.raw": 3, "b.raw": 5, "m.raw": 1, "n.raw": 2, "z.raw": 9})
		})
	}
}

// TestTheNumberOfASingleDiskStays: the disk of a volume for one image is the same disk if its image
// gets another name.
func TestTheNumberOfASingleDiskStays(t *testing.T) {
	opt := testOptions(t, "a.raw", "b.raw")
	opt.PersistentDir, opt.OnImageChange = t.TempDir(), instance.ImageChangeKeep
	from := filepath.Join(opt.Images.Dir, "b.raw")
	require.NoError(t, os.Remove(from))
	opt.Settings.Disk.LUN = 7
	require.NoError(t, start(t, opt).end())
	opt.Settings.Disk.LUN = 0
	require.NoError(t, os.Rename(filepath.Join(opt.Images.Dir, "a.raw"), from))
	d := start(t, opt)
	require.EqualValues(t, 7, d.Status().LUNs[0].LUN)
	require.NoError(t, d.end())
}

// TestANumberIsFreeWithoutItsDisk: where disks go with their images, so do their numbers.
func TestANumberIsFreeWithoutItsDisk(t *testing.T) {
	opt := testOptions(t, "a.raw", "b.raw")
	opt.Owner = "us"
	require.NoError(t, start(t, opt).end())
	require.NoError(t, os.Rename(filepath.Join(opt.Images.Dir, "a.raw"),
		filepath.Join(opt.Images.Dir, "c.raw")))
	d := start(t, opt)
	all := d.Status().LUNs
	require.Equal(t, "b.raw", all[0].Image)
	require.EqualValues(t, 2, all[0].LUN)
	require.Equal(t, "c.raw", all[1].Image)
	require.EqualValues(t, 1, all[1].LUN)
	require.NoError(t, d.end())
}

// TestARefusedIdentityIsNotKept: a disk is told to have the serial number that another one has from
// an earlier start. The start is refused, and the disk still has its own.
func TestARefusedIdentityIsNotKept(t *testing.T) {
	opt := testOptions(t, "m.raw", "n.raw")
	opt.WorkDirNamed = true
	serials := func() (all []string) {
		d := start(t, opt)
		for _, l := range d.Status().LUNs {
			all = append(all, l.Serial)
		}
		require.NoError(t, d.end())
		return all
	}
	own := serials()
	n := options.SingleDisk{DiskSettings: opt.Settings.Disk}
	n.Identity.Serial = own[0]
	opt.Settings.Disks = map[string]options.SingleDisk{"n.raw": n}
	d := testtool.Must(New(opt))(t)
	require.ErrorContains(t, d.Run(t.Context()), "have the same serial number")
	opt.Settings.Disks = nil
	require.Equal(t, own, serials())
}
