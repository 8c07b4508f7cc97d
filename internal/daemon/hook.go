package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/kubevirt"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/nbd"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

const (
	// hookReconnect is how long QEMU holds requests while a connection that was lost, for example
	// by kick, is made again.
	hookReconnect = 30 * time.Second
	// hookVhostReconnect is how long QEMU waits before each attempt to reconnect a disk by
	// vhost-user. It tries for as long as the machine lives, and the guest waits.
	hookVhostReconnect = time.Second
	// hookInherit is how long the servers of the disks may take when a machine arrives.
	hookInherit = 30 * time.Second
)

var (
	errHookPanic = errors.New("internal error")
	errNotAsked  = errors.New("KubeVirt has not asked this hook for the disks of this pod, so " +
		"nobody may use them: if the machine is starting or arriving here, the log of the " +
		"launcher, container compute, says what has failed before, such as another hook sidecar")
)

// machines is the number of connections that use disks; -1: none can use one yet.
func (d *Daemon) machines() int {
	if d.running() != nil {
		return -1
	}
	n := len(d.nbd.Sessions())
	if d.vhost != nil {
		n += len(d.vhost.Sessions())
	}
	return n
}

// hookGate decides whether the disks of a hook may be used: not before the launcher got its first
// successful answer. KubeVirt (1.7) starts QEMU for an arriving machine even if its hooks were not
// asked, or have refused: it tries again without asking.
type hookGate struct {
	mu      sync.Mutex // held while a call of the launcher is answered
	given   bool       // guarded by mu; the launcher of this pod got the disks
	refused error      // guarded by mu; why they are refused for as long as the pod lives
}

// The answer that is stored in the pod, for a container that is restarted under its machine: the
// first word, or the second word and the reason. Without an answer the disks are refused.
const (
	answerGiven   = "given"
	answerRefused = "refused: "
)

// define answers a call of the launcher. The disks can be used after the first success. A refusal
// of a machine that arrives by a live migration is final.
func (d *Daemon) define(ctx context.Context, c kubevirt.Call) (domain []byte, err error) {
	d.gate.mu.Lock()
	defer d.gate.mu.Unlock()
	if err := d.gate.refused; err != nil {
		return nil, err
	}
	err = errHookPanic // unless there is another answer
	defer func() {
		switch {
		case err == nil:
		case c.Arrives():
			d.refuseForGood(err)
		case !d.gate.given:
			d.inUse.Refuse(err)
		}
	}()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("the launcher has given up waiting for the disks: %w",
			context.Cause(ctx))
	}
	if domain, err = d.putDisks(ctx, c); err == nil {
		err = d.give()
	}
	if err != nil {
		return nil, err
	}
	return domain, nil
}

// give allows the use of the disks. It is called with gate.mu held.
func (d *Daemon) give() error {
	if d.gate.given {
		return nil
	}
	if err := d.keepAnswer(answerGiven); err != nil {
		return fmt.Errorf("that the machine has the disks cannot be kept, and this container, "+
			"started again, would refuse them: %w", err)
	}
	d.gate.given = true
	d.inUse.Refuse(nil)
	return nil
}

// refuseForGood refuses the disks for as long as the pod lives, also after a restart of this
// container. It is called with gate.mu held.
func (d *Daemon) refuseForGood(reason error) {
	d.gate.given, d.gate.refused = false, reason
	d.inUse.Refuse(reason)
	close(d.launcher.refused) // once: from now on define returns earlier
	d.log.Warn("the disks are refused to all clients from now on", zap.Error(reason))
	err := d.keepAnswer(answerRefused + reason.Error())
	if err == nil {
		return
	}
	// Without an answer they are refused, too.
	gone := os.Remove(d.opt.Hook.NBD().Answer())
	if gone == nil || errors.Is(gone, fs.ErrNotExist) {
		d.log.Warn("the reason of the refusal cannot be kept: if this container is started "+
			"again, it gives another one", zap.Error(err))
		return
	}
	d.log.Error("the refusal cannot be kept: if this container is started again, the disks can "+
		"be used", zap.Error(errors.Join(err, gone)))
}

func (d *Daemon) keepAnswer(text string) error {
	return durable.Write(d.opt.Hook.NBD().Answer(), 0o600, func(f *os.File) error {
		_, err := f.WriteString(text)
		return err
	})
}

// closeGate refuses the disks of a hook until its launcher has them, unless an earlier run in this
// pod has given them. If that run has refused them, so does every server at its socket, such as a
// container that a person has added to the pod. closeGate is called before anybody can connect.
func (d *Daemon) closeGate() error {
	d.gate.mu.Lock()
	defer d.gate.mu.Unlock()
	for _, p := range d.opt.Beside() {
		text, err := durable.Read(p.Answer())
		reason, refused := strings.CutPrefix(string(text), answerRefused)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return fmt.Errorf("whether the disks of this pod are refused: %q %w", p.Answer(), err)
		case refused:
			d.gate.refused = errors.New(reason)
		case string(text) != answerGiven:
			return fmt.Errorf("whether the disks of this pod are refused: %q does not say so: "+
				"start the machine again, in a new pod", p.Answer())
		case d.opt.Hook != nil && p == d.opt.Hook.NBD():
			d.gate.given = true
		}
	}
	switch {
	case d.gate.refused != nil:
		d.inUse.Refuse(d.gate.refused)
		if d.launcher != nil {
			close(d.launcher.refused) // once, as in refuseForGood
		}
	case d.opt.Hook != nil && !d.gate.given:
		d.inUse.Refuse(errNotAsked)
	}
	return nil
}

// checkClaim refuses a machine whose claim is in another place than the disks.
func (d *Daemon) checkClaim(c kubevirt.Call) error {
	if !d.opt.Hook.ClaimFound {
		return nil // a person has named the place
	}
	dir, said, err := c.Claim(d.opt.Hook.Container)
	if err != nil || !said || dir == d.opt.PersistentDir ||
		options.SameDirectory(dir, d.opt.PersistentDir) {
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
func (d *Daemon) putDisks(ctx context.Context, c kubevirt.Call) ([]byte, error) {
	if err := d.checkClaim(c); err != nil {
		return nil, err
	}
	var disks []kubevirt.Disk
	luns, far := d.machineDisks()
	for _, l := range luns {
		if !l.State.Usable() {
			return nil, fmt.Errorf("disk %q is %s: %s%s", l.Image, l.State.Words(), l.Reason,
				todo(l.WhatToDo))
		}
		if l.State.Troubled() {
			d.log.Warn("the machine gets a disk that is in trouble", zap.Uint16("lun", l.LUN),
				zap.String("image", l.Image), zap.String("state", string(l.State)),
				zap.String("reason", l.Reason), zap.String("what_to_do", l.WhatToDo))
		}
		_, remote := far[l.LUN]
		export := libvirt.Export{
			Name:       d.nbd.Export(l.LUN),
			Socket:     d.opt.Hook.LauncherNBD(),
			Portal:     d.hookPortal,
			Reconnect:  hookReconnect,
			AccessMode: hookAccess(l.AccessMode),
			ReadOnly:   l.ReadOnly,
			Serial:     l.Serial,
			BlockSize:  l.BlockSize,
		}
		one := kubevirt.Disk{Number: l.LUN, Remote: remote, Export: export,
			MemoryLimit: d.opt.Hook.MemoryLimit}
		if l.VhostUser != "" && d.opt.VhostUserDir == d.opt.Hook.VhostUser() {
			one.VhostUser = libvirt.VhostUser{Reconnect: hookVhostReconnect,
				Socket: filepath.Join(d.vhostClientDir(), filepath.Base(l.VhostUser))}
		}
		disks = append(disks, one)
	}
	d.sayIfAskedAgain(c, disks)
	domain, err := kubevirt.Edit(c, disks, d.opt.Hook.Container)
	if err != nil || !c.Arrives() {
		return domain, err
	}
	ctx, cancel := context.WithTimeout(ctx, hookInherit)
	defer cancel()
	for _, l := range luns {
		if err := far[l.LUN].Inherit(ctx); err != nil {
			return nil, fmt.Errorf("disk %q cannot follow the machine: %w", l.Image, err)
		}
		d.log.Info("the machine arrives by a live migration: its first write takes the disk over",
			zap.Uint16("lun", l.LUN))
	}
	return domain, nil
}

// socketsDropped says when a machine has lost the sockets of its disks.
const socketsDropped = "KubeVirt 1.9 writes the domain again behind this hook's answer, without " +
	"sockets, if the cluster has an object of kind Plugin"

// sayIfAskedAgain logs that KubeVirt has not used the former answer.
func (d *Daemon) sayIfAskedAgain(c kubevirt.Call, disks []kubevirt.Disk) {
	if !d.gate.given || d.machines() > 0 || c.Arrives() ||
		!kubevirt.Fresh(c, disks, d.opt.Hook.Container) {
		return
	}
	d.log.Warn("KubeVirt asks for the disks again, as if it had none of them: its launcher, " +
		"container compute, could not define or start the machine, and has the reason in its " +
		"log. If that is a missing source of a disk, which is one by vhost-user: " +
		socketsDropped + ". Then use the transport nbd, or be a plugin")
}

// sayIfAtAddress logs, once, that the machine connects to the address instead of the socket.
func (d *Daemon) sayIfAtAddress(e serving.LoginEvent) {
	if d.hookPortal.Host == "" || e.Client != d.opt.Hook.NBD().String() {
		return
	}
	if _, _, err := net.SplitHostPort(e.Remote); err == nil { // else it is a process
		d.atAddress.Do(func() {
			d.log.Warn("the machine has come to the address of its disks, and not to their "+
				"socket: "+socketsDropped, zap.String("address", d.hookPortal.Host))
		})
	}
}

// machineDisks are the disks for the machine, and by number those of other servers among them. A
// served snapshot is for another client, such as a backup.
func (d *Daemon) machineDisks() (luns []status.LUN, far map[uint16]*nbd.Remote) {
	mine := map[uint16]bool{}
	far = map[uint16]*nbd.Remote{}
	for _, s := range d.disks.Served() {
		mine[s.LUN] = !s.IsSnapshot()
		if s.AlreadyOpen == nil {
			continue
		}
		if remote, ok := s.AlreadyOpen.Disk.(*nbd.Remote); ok {
			far[s.LUN] = remote
		}
	}
	for _, l := range d.Status().LUNs {
		if mine[l.LUN] {
			luns = append(luns, l)
		}
	}
	return luns, far
}

// todo is the advice that follows the reason in a message.
func todo(do string) string {
	if do == "" {
		return ""
	}
	return ": " + do
}

// hookAccess is the access mode in the domain. A write-shared disk is not marked as shared: nobody
// else in the pod reaches it, and KubeVirt would take the machine for one that can migrate.
func hookAccess(mode string) libvirt.AccessMode {
	if mode == string(serving.AccessReadShared) {
		return libvirt.ReadShared
	}
	return libvirt.WriteExclusive
}

// vhostClientDir is the directory of the sockets for vhost-user as QEMU finds it.
func (d *Daemon) vhostClientDir() string {
	if h := d.opt.Hook; h != nil && d.opt.VhostUserDir == h.VhostUser() {
		return h.LauncherVhostUser()
	}
	return absolute(d.opt.VhostUserDir)
}
