package daemon

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
)

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
	d, err := New(opt)
	require.NoError(t, err)
	require.ErrorContains(t, d.Run(t.Context()), "have the same serial number")
	opt.Settings.Disks = nil
	require.Equal(t, own, serials())
}
