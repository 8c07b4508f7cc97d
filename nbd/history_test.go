package nbd

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// historian is a disk that has snapshots, of which the last one was just taken. Every other page is
// written since the first.
type historian struct {
	disk.Disk
	names atomic.Pointer[[]string]
}

func (h *historian) set(names ...string) { h.names.Store(&names) }

// Since has IDs that are names with the first digit left out: b and 1b are one after the other.
func (h *historian) Since() (all []disk.Snapshot) {
	for _, id := range *h.names.Load() {
		all = append(all, disk.Snapshot{Name: strings.TrimLeft(id, "0123456789"), ID: id})
	}
	return all
}

func (h *historian) Changed(_ context.Context, since string, off, length int64) (bool, int64,
	error,
) {
	at := slices.IndexFunc(h.Since(), func(s disk.Snapshot) bool { return s.ID == since })
	if at < 0 {
		return false, 0, fmt.Errorf("there is no snapshot %q", since)
	}
	changed := at < len(h.Since())-1 && off/layerPage%2 == 1
	return changed, min(length, layerPage-off%layerPage), nil
}

// TestChangedSinceSnapshots: each snapshot is a context in the form of QEMU's bitmaps, the newest
// ones of many.
func TestChangedSinceSnapshots(t *testing.T) {
	h := &historian{Disk: disktest.NewMemory(diskSize)}
	h.set("a", "b")
	v := serve(t, 1, func(o *serving.Options) { o.Disk = h })
	const a, b = "qemu:dirty-bitmap:a", "qemu:dirty-bitmap:b"
	list := func(queries ...string) (names []string) {
		c := v.hello(t)
		require.Equal(t, uint32(repAck), c.option(optStructuredReply, nil)[0].kind)
		for _, r := range c.option(optListMeta, metaData("", queries...)) {
			if r.kind == repMetaContext {
				names = append(names, string(r.data[4:]))
			}
		}
		return names
	}
	require.Equal(t, []string{"base:allocation", "qemu:allocation-depth", a, b}, list())
	require.Equal(t, []string{"qemu:allocation-depth", a, b}, list("qemu:"))
	require.Equal(t, []string{b}, list(b, "qemu:dirty-bitmap:c"))
	for _, mode := range []int{structured, extended} {
		c := v.openWith(t, "", mode, a, "base:allocation", b)
		got := c.do(cmdBlockStatus, 0, layerPage/2, 2*layerPage, nil)
		require.Equal(t, []extent{{layerPage / 2, 0}, {layerPage, stateDirty}, {layerPage / 2, 0}},
			got.status[contextBitmap])
		require.Equal(t, []extent{{2 * layerPage, 0}}, got.status[contextBitmap+1])
		require.Len(t, got.status, 3)
		if mode == extended {
			got = c.do(cmdBlockStatus, 0, 0, 0, join(u64(layerPage), u32(contextBitmap+1)))
			require.Equal(t, map[uint32][]extent{contextBitmap + 1: {{layerPage, 0}}}, got.status)
		}
		for _, names := range [][]string{{"b"}, {"1a", "b"}} { // deleted, and made again
			h.set(names...)
			require.Equal(t, uint32(eInval), c.do(cmdBlockStatus, 0, 0, layerPage, nil).code)
		}
		c.alive()
		h.set("a", "b")
	}
	many := make([]string, 100)
	for i := range many {
		many[i] = fmt.Sprintf("%dsnap", i)
	}
	h.set(many...)
	names := list("qemu:dirty-bitmap:")
	require.Len(t, names, maxBitmaps)
	require.Equal(t, "qemu:dirty-bitmap:snap", names[maxBitmaps-1])
	c := v.openWith(t, "", structured, names...)
	require.Len(t, c.do(cmdBlockStatus, 0, 0, layerPage, nil).status, maxBitmaps)
}

// TestAnotherDiskBetweenItsContextsAndGo: what was agreed on of one disk is not asked of another
// one that got its name and number since.
func TestAnotherDiskBetweenItsContextsAndGo(t *testing.T) {
	h := &historian{Disk: disktest.NewMemory(diskSize)}
	h.set("a")
	v := serve(t, 1, func(o *serving.Options) { o.Disk = h })
	c := v.hello(t)
	require.Equal(t, uint32(repAck), c.option(optStructuredReply, nil)[0].kind)
	require.Len(t, c.option(optSetMeta, metaData("", "qemu:dirty-bitmap:a")), 2)
	before := v.Server.disks.At(1).Options
	require.NoError(t, testtool.Err(v.Server.disks.Remove(1)))
	before.Disk, before.Identity.NAA = disktest.NewMemory(diskSize), [8]byte{0x30, 9}
	require.NoError(t, v.Server.disks.Add(before))
	c.send(optionBytes(optGo, infoData("")))
	c.ended()
	v.open(t, "", structured).alive()
}

// TestTheEmptyNameIsNoOtherDisk: a client whose only disk was removed connects again, and would go
// on with the next only disk where it was.
func TestTheEmptyNameIsNoOtherDisk(t *testing.T) {
	v := serve(t, 1, nil)
	replace := func(c *client, change func(*serving.Options)) {
		opt := v.Server.disks.At(1).Options
		require.NoError(t, testtool.Err(v.Server.disks.Remove(1)))
		c.ended()
		change(&opt)
		require.NoError(t, v.Server.disks.Add(opt))
	}
	same := func(*serving.Options) {}
	another := func(o *serving.Options) { o.Identity.NAA[7]++ }
	replace(v.open(t, "disk1.raw", structured), another)
	replace(v.open(t, "", structured), same)
	replace(v.open(t, "", structured), another)
	refused := v.hello(t).option(optGo, infoData(""))[0]
	require.Equal(t, uint32(repErrUnknown), refused.kind)
	require.Contains(t, string(refused.data), `removed while clients had it: name the disk`)
	v.open(t, "disk1.raw", structured).alive()
}
