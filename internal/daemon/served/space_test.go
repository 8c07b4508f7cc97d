package served

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

// accountant is a disk whose storage may hang.
type accountant struct {
	brokenDisk
	asked  int
	answer chan error
}

func (a *accountant) Usage() (disk.Usage, error) {
	a.asked++
	if err := <-a.answer; err != nil {
		return disk.Usage{}, err
	}
	return disk.Usage{Used: 1, Available: 2}, nil
}

// TestPagesDoNotWaitForStorage checks that the page does not hang with the storage, and asks it
// only once.
func TestPagesDoNotWaitForStorage(t *testing.T) {
	require.Nil(t, newSpaceGauge(&brokenDisk{}).now())
	a := &accountant{answer: make(chan error, 1)}
	d := serve(t, a)
	space := func() *status.Space {
		luns, _ := d.Status(true)
		return luns[0].Space
	}
	want := &status.Space{Used: 1, Free: 2}
	known := func() { // on a busy machine an answer may take longer than a page waits for it
		t.Helper()
		testtool.Within(t, time.Minute, func() bool { return space() != nil }, "the space is known")
		require.Equal(t, want, space())
	}
	a.answer <- nil
	known()
	for range 3 {
		require.Equal(t, want, space(), "the last answer")
	}
	a.answer <- errors.New("broken")
	one := d.table.all()[0]
	gauge := one.look().space
	testtool.Eventually(t, func() bool {
		gauge.mu.Lock()
		defer gauge.mu.Unlock()
		return !gauge.asking
	}, "it has the answer")
	require.Equal(t, 2, a.asked, "asked again before the answer")
	require.Nil(t, gauge.last)
	a.answer <- nil
	known()
	close(a.answer) // for the question that is still open
	require.NoError(t, one.take().Close())
	require.Nil(t, space(), "the disk is closed")
}

// together is a disk that answers when all of them are asked, or when the test ends.
type together struct {
	brokenDisk
	asked *sync.WaitGroup
	over  <-chan struct{}
}

func (d *together) Usage() (disk.Usage, error) {
	d.asked.Done()
	all := make(chan struct{})
	go func() {
		defer close(all)
		d.asked.Wait()
	}()
	select {
	case <-all:
		return disk.Usage{Used: 3}, nil
	case <-d.over:
		return disk.Usage{}, errors.New("the others were not asked")
	}
}

// TestStorageIsAskedSideBySide: hanging disks delay a page once, not once for each disk.
func TestStorageIsAskedSideBySide(t *testing.T) {
	const disks = 30
	asked, over := new(sync.WaitGroup), make(chan struct{})
	asked.Add(disks)
	all := make([]disk.Disk, disks)
	for i := range all {
		all[i] = &together{asked: asked, over: over}
	}
	d := serve(t, all...)
	defer time.AfterFunc(time.Minute, func() { close(over) }).Stop()
	var gauges []*gauge[disk.Usage]
	for _, s := range d.table.served() {
		gauges = append(gauges, s.look().space)
	}
	for _, space := range readAll(nil, gauges) {
		require.Equal(t, &disk.Usage{Used: 3}, space)
	}
}
