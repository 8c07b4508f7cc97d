package instance

import (
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
)

// makeEmpty makes a disk that reads as zeros. It is complete, and needs no image.
func (o *opening) makeEmpty() (*Instance, error) {
	if o.opt.Size == 0 {
		return nil, &SizeError{Image: o.name, Reason: "is not valid: an empty disk needs a size"}
	}
	if block := int64(max(o.opt.BlockSize, disk.SectorSize)); o.opt.Size%block != 0 {
		return nil, notWhole(o.name, o.opt.Size, block)
	}
	if err := o.dir.clear(); err != nil {
		return nil, err
	}
	// The state comes first: a file without one looks like a disk that came with the volume.
	s := &state{Version: stateVersion, Image: o.name, Owner: o.owner(), Mode: o.opt.Mode,
		Size: o.opt.Size, BlockSize: o.newBlockSize(),
		Identity: o.identity(newIdentity()), Created: time.Now().UTC(),
		Durable: o.durable(), LUN: o.opt.LUN, Complete: true, Map: newMapID(), Boot: bootID(),
		Chain: []image.Fingerprint{}}
	if err := o.spaceError(o.dir.saveState(s, s.Durable)); err != nil {
		return nil, err
	}
	if err := o.spaceError(o.createFile(s)); err != nil {
		return nil, err
	}
	inst, err := o.assembleComplete(s)
	if err == nil {
		o.log.Info("made an empty disk", zap.Int64("size", s.Size),
			zap.String("disk", o.dir.disk()), zap.String("serial", s.Identity.Serial))
	}
	return inst, err
}
