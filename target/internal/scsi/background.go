package scsi

import (
	"context"
	"sync"
)

// background tracks work of a device that outlives the command which started it. Call init first.
type background struct {
	ctx    context.Context // ends when the device is closed
	cancel context.CancelFunc

	mu     sync.Mutex
	closed bool // guarded by mu
	wg     sync.WaitGroup
}

func (b *background) init() { b.ctx, b.cancel = context.WithCancel(context.Background()) }

// begin registers a goroutine that is about to start. It refuses if the device is closed.
func (b *background) begin() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return false
	}
	b.wg.Add(1)
	return true
}

func (b *background) end() { b.wg.Done() }

// beginLonger registers a goroutine that is about to start and uses a unit's disk. It refuses if
// the device is closed or the unit removed.
func (u *unit) beginLonger(d *Device) bool {
	if !u.Begin() {
		return false
	}
	if !d.background.begin() {
		u.End()
		return false
	}
	return true
}

func (u *unit) endLonger(d *Device) {
	d.background.end()
	u.End()
}

// Close stops the device's background work and waits until none of its disk calls is in progress.
// An interrupted sanitize operation counts as failed.
func (d *Device) Close() {
	b := &d.background
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.cancel()
	b.wg.Wait()
}
