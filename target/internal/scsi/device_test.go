package scsi

import (
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"kubevirt.io/disk/serving"
)

// LUN is a disk as tests describe it.
type LUN = serving.Options

// The access modes.
const (
	AccessWriteExclusive = serving.AccessWriteExclusive
	AccessWriteShared    = serving.AccessWriteShared
	AccessReadShared     = serving.AccessReadShared
)

// storedHandover is the name under which package serving keeps handovers.
const storedHandover = "handover"

// front is a device as the only front end.
type front struct{ *Device }

func (f front) Added(d *serving.Disk) error {
	_, err := f.Take(d)
	return err
}
func (f front) Removed(d *serving.Disk)          { f.Drop(d) }
func (f front) Resized(d *serving.Disk)          { f.Grew(d) }
func (f front) Shared(*serving.Disk)             {}
func (f front) Holders(d *serving.Disk) []string { return f.ReservationHolders(d) }

// NewDevice makes a device with its disks.
func NewDevice(opt Options, luns []LUN) (*Device, error) {
	if opt.Log == nil {
		opt.Log = zap.New(&lateCore{zapcore.NewNopCore()})
	}
	d, err := New(opt, serving.New(serving.Config{Log: opt.Log}))
	if err != nil {
		return nil, err
	}
	if err := d.disks.Serve(front{d}); err != nil {
		return nil, err
	}
	for _, l := range luns {
		if err := d.disks.Add(l); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// lateCore is a log that goes to another core later.
type lateCore struct{ zapcore.Core }

func (c *lateCore) With([]zapcore.Field) zapcore.Core { return c }

// watchedBy has a core get what is logged from now on.
func (d *Device) watchedBy(core zapcore.Core) { d.log.Core().(*lateCore).Core = core }
