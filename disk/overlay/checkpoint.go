package overlay

import (
	"errors"
	"fmt"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/internal/osfile"
)

// checkpointPages is how many pages of the map one checkpoint step copies: 1 MiB.
const checkpointPages = 256

// Flush makes what was written durable, if the disk is: the data first, then the map that says
// where it is, each with its own barrier. Between the two a crash leaves blocks that are written
// but not marked, which nobody was promised. Durability: as Disk.
func (o *Disk) Flush() error {
	if o.failed.Load() {
		return disk.ErrFailed
	}
	if o.maps.durable == nil || o.mapless.Load() {
		return o.file.Flush()
	}
	o.flushMu.Lock()
	defer o.flushMu.Unlock()
	switch {
	case o.failed.Load():
		return disk.ErrFailed
	case o.mapless.Load(): // since then
		return o.file.Flush()
	}
	err := o.checkpoint()
	if errors.Is(err, disk.ErrFailed) {
		o.failed.Store(true)
		err = errors.Join(err, o.maps.distrust())
	}
	return err
}

// Sync is Flush, and brings the data to storage also where Flush does not. See Syncer.
func (o *Disk) Sync() error {
	if err := o.Flush(); err != nil || o.maps.durable != nil {
		return err
	}
	return o.file.Sync()
}

// checkpoint makes the data durable, and then the map. After ErrFailed nobody can tell what was
// lost.
func (o *Disk) checkpoint() error {
	saved := false
	err := o.maps.takeDirty(checkpointPages, func(pages []int64) error {
		saved = true
		return o.savePages(pages)
	})
	switch {
	case err != nil:
		return err
	case !saved: // no block was marked since the last time
		return o.file.Flush()
	}
	if err := osfile.Retry(o.maps.durable.Sync); err != nil {
		return fmt.Errorf("%w: flush of the map: %w", disk.ErrFailed, err)
	}
	return nil
}

// savePages saves pages as they were before the data was flushed.
func (o *Disk) savePages(pages []int64) error {
	copies := make([]byte, len(pages)*mapPageSize)
	for i, page := range pages {
		o.blocks.snapshotPage(page, copies[i*mapPageSize:(i+1)*mapPageSize])
	}
	if err := o.file.Flush(); err != nil {
		return err
	}
	for i, page := range pages {
		if _, err := o.maps.durable.WriteAt(copies[i*mapPageSize:(i+1)*mapPageSize],
			mapHeaderSize+page*mapPageSize); err != nil {
			if osfile.IsFull(err) {
				return mapError(err)
			}
			return fmt.Errorf("%w: writing the map: %w", disk.ErrFailed, err)
		}
	}
	return nil
}
