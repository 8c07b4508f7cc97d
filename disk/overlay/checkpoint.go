package overlay

import (
	"errors"
	"fmt"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/osfile"
)

// checkpointPages is how many pages of the map one step of a checkpoint copies: 1 MiB.
const checkpointPages = 256

// Flush makes writes durable if the disk is durable: first the data, then the map, each with its
// own barrier. After a crash between the two, some blocks are written but not marked. No flush had
// acknowledged these. Durability: as Disk.
func (o *Disk) Flush() error {
	if o.fate.failed.Load() {
		return disk.ErrFailed
	}
	if o.maps.durable == nil || o.mapless.Load() {
		return o.flushFile()
	}
	o.flushMu.Lock()
	defer o.flushMu.Unlock()
	switch {
	case o.retired:
		return nil // another layer has all of this layer's content
	case o.fate.failed.Load():
		return disk.ErrFailed
	case o.mapless.Load(): // the map was released since the last flush
		return o.flushFile()
	}
	return o.judge(o.checkpoint())
}

// judge makes the disk fail if an error says that a flush has failed.
func (o *Disk) judge(err error) error {
	if errors.Is(err, disk.ErrFailed) {
		o.fate.failed.Store(true)
		if !o.mapless.Load() {
			err = errors.Join(err, o.maps.distrust())
		}
	}
	return err
}

// flushFile flushes a file without a map.
func (o *Disk) flushFile() error {
	return o.judge(o.file.Flush())
}

// checkpoint makes the data durable, and then the map. After ErrFailed it is unknown what is lost.
func (o *Disk) checkpoint() error {
	saved := false
	err := o.maps.takeDirty(checkpointPages, func(pages []int64) error {
		saved = true
		return o.savePages(pages)
	})
	switch {
	case err != nil:
		return err
	case !saved: // no block was marked since the last checkpoint
		return o.file.Flush()
	}
	if err := osfile.Retry(o.maps.durable.Sync); err != nil {
		return fmt.Errorf("%w: flush of the map: %w", disk.ErrFailed, err)
	}
	return nil
}

// savePages saves pages of the map that were copied before the data was flushed.
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
			if disk.IsNoSpace(err) {
				return mapError(err)
			}
			return fmt.Errorf("%w: writing the map: %w", disk.ErrFailed, err)
		}
	}
	return nil
}
