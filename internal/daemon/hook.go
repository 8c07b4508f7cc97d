package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/kubernetes/hook"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/nbd"
	"kubevirt.io/disk/serving"
)

const (
	// hookReconnect is how long QEMU holds requests while a connection that was lost, for example
	// by kick, is made again.
	hookReconnect = 30 * time.Second
	// hookInherit is how long the servers of the disks may take when a machine arrives.
	hookInherit = 30 * time.Second
)

var errHookPanic = errors.New("internal error")

// machines is the number of connections that use disks; -1: none can be used yet.
func (d *Daemon) machines() int {
	if d.running() != nil {
		return -1
	}
	return len(d.nbd.Sessions())
}

// define answers a call of the launcher. A refusal of a machine that arrives by a live migration is
// final: KubeVirt (1.7) tries again without asking, and then its QEMU would use the disks.
func (d *Daemon) define(ctx context.Context, c hook.Call) (domain []byte, err error) {
	d.hookMu.Lock()
	defer d.hookMu.Unlock()
	if err := d.hookRefused; err != nil {
		return nil, err
	}
	answered := false
	defer func() {
		switch {
		case answered || !c.Arrives():
		case err != nil:
			d.refuseForGood(err)
		default:
			d.refuseForGood(errHookPanic)
		}
	}()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("the launcher has given up waiting for the disks: %w",
			context.Cause(ctx))
	}
	domain, err = d.putDisks(ctx, c)
	answered = err == nil
	return domain, err
}

// refuseForGood refuses the disks to everybody for as long as the pod lives, also when this
// container is started again.
func (d *Daemon) refuseForGood(reason error) {
	d.hookRefused = reason
	d.nbd.Refuse(reason)
	err := durable.Write(d.opt.Hook.Refusal(), 0o600, func(f *os.File) error {
		_, err := f.WriteString(reason.Error())
		return err
	})
	if err != nil {
		d.log.Error("the refusal cannot be kept: if this container is started again, the disks "+
			"can be used", zap.Error(err))
	}
}

// recallRefusal refuses the disks if an earlier run in this pod has refused them for good.
func (d *Daemon) recallRefusal() error {
	if d.opt.Hook == nil {
		return nil
	}
	path := d.opt.Hook.Refusal()
	text, err := durable.Read(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("whether the disks of this pod are refused: %q %w", path, err)
	}
	d.hookMu.Lock()
	defer d.hookMu.Unlock()
	d.hookRefused = errors.New(string(text))
	d.nbd.Refuse(d.hookRefused)
	return nil
}

// checkClaim refuses a machine that says that its claim is elsewhere than where the disks are.
func (d *Daemon) checkClaim(c hook.Call) error {
	if !d.opt.Hook.ClaimFound {
		return nil // a person has said where they are
	}
	dir, said, err := c.Claim(d.opt.Hook.Container)
	if err != nil || !said || options.SameDir(dir, d.opt.PersistentDir) {
		return err
	}
	by := d.opt.Setting(&d.opt.PersistentDir)
	if dir == "" {
		return fmt.Errorf("the machine has no claim for this hook sidecar, and its disks are in "+
			"%q: name another directory with %v, or \"\" for disks that end with the machine",
			d.opt.PersistentDir, by)
	}
	return fmt.Errorf("the machine has the claim of this hook sidecar at %q, and its disks are "+
		"not there: mount the claim so that it can be written, or say where they are with %v",
		dir, by)
}

// putDisks puts the disks into a domain. If the machine arrives by a live migration, it makes them
// its own.
func (d *Daemon) putDisks(ctx context.Context, c hook.Call) ([]byte, error) {
	if err := d.checkClaim(c); err != nil {
		return nil, err
	}
	var disks []hook.Disk
	now, far := d.Status(), d.farDisks()
	for _, l := range now.LUNs {
		if l.Failure != "" {
			return nil, fmt.Errorf("disk %q has failed: %s", l.Image, l.Failure)
		}
		_, elsewhere := far[l.LUN]
		disks = append(disks, hook.Disk{Number: l.LUN, Elsewhere: elsewhere, Export: libvirt.Export{
			Name:       d.nbd.Export(l.LUN),
			Socket:     d.opt.Hook.LauncherNBD(),
			Reconnect:  hookReconnect,
			AccessMode: hookAccess(l.AccessMode),
			ReadOnly:   l.ReadOnly,
			Serial:     l.Serial,
			BlockSize:  l.BlockSize,
		}})
	}
	domain, err := hook.Edit(c, disks, d.opt.Hook.Container)
	if err != nil || !c.Arrives() {
		return domain, err
	}
	ctx, cancel := context.WithTimeout(ctx, hookInherit)
	defer cancel()
	for _, l := range now.LUNs {
		if err := far[l.LUN].Inherit(ctx); err != nil {
			return nil, fmt.Errorf("disk %q cannot follow the machine: %w", l.Image, err)
		}
		d.log.Info("the machine arrives by a live migration: its first write takes the disk over",
			zap.Uint16("lun", l.LUN))
	}
	return domain, nil
}

// farDisks are the disks of other servers, by number.
func (d *Daemon) farDisks() map[uint16]*nbd.Remote {
	far := map[uint16]*nbd.Remote{}
	for _, s := range d.disks.Served() {
		if s.Elsewhere != nil {
			far[s.LUN] = s.Elsewhere.Disk.(*nbd.Remote)
		}
	}
	return far
}

// hookAccess is the access mode in the domain. A disk that is shared to be written is not: nobody
// else reaches it in the pod, and KubeVirt would take the machine for one that can migrate.
func hookAccess(mode string) libvirt.AccessMode {
	if mode == string(serving.AccessReadShared) {
		return libvirt.ReadShared
	}
	return libvirt.WriteExclusive
}
