package daemon

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/nbd"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target"
)

// nbdListener is a bound portal.
type nbdListener struct {
	net.Listener
	nbd.Portal
}

// address is unix:PATH, or HOST:PORT.
func (l nbdListener) address() string {
	if l.SameUser {
		return l.Addr().String()
	}
	if path, ok := strings.CutPrefix(l.Name, serving.SocketPrefix); ok {
		return serving.SocketPrefix + absolute(path)
	}
	return strings.TrimPrefix(l.Name, serving.AddressPrefix)
}

// absolute makes a path for others, whose working directory may differ.
func absolute(path string) string {
	if abs, err := filepath.Abs(path); err == nil {
		return abs
	}
	return path
}

// listenNBD binds all portals of NBD, or none.
func (d *Daemon) listenNBD(ctx context.Context) (all []nbdListener, err error) {
	by := d.opt.SettingsOf(&d.opt.NBD)
	var secure *tls.Config
	if d.opt.NBDTLS != (options.NBDTLS{}) {
		t := d.opt.NBDTLS
		if secure, err = nbd.LoadTLS(t.Cert, t.Key, t.ClientCA, d.log); err != nil {
			return nil, err
		}
	}
	var addresses []options.Address
	for _, p := range d.opt.NBD {
		if p.Socket == "" {
			addresses = append(addresses, p.Address)
		}
	}
	for _, p := range d.opt.NBD {
		var l net.Listener
		switch {
		case !serving.ValidName(p.String()):
			err = fmt.Errorf("NBD socket %q: the path is the name of its clients, so it has at "+
				"most 218 bytes and no spaces; choose another with %s", p.Socket, by)
		case p.Socket != "":
			if l, err = socket.ListenUnix(p.Socket); err != nil {
				err = fmt.Errorf("NBD socket %q: %w; choose another with %s", p.Socket, err, by)
			}
		default:
			l, err = listen(ctx, "NBD portal", p.Address, addresses, by)
		}
		if err != nil {
			closeAll(all)
			return nil, err
		}
		portal := nbd.Portal{Name: p.String()}
		if p.Socket == "" {
			portal = nbd.Portal{Name: serving.AddressPrefix + l.Addr().String(), TLS: secure}
		}
		all = append(all, nbdListener{l, portal})
		d.log.Info("NBD portal", zap.String("address", all[len(all)-1].address()),
			zap.Bool("tls", portal.TLS != nil))
	}
	return append(all, d.listenForLauncher(ctx)...), nil
}

// listenForLauncher binds the address of a hook in addition to its socket. Both belong to the same
// client: the machine. Only a machine that lost the socket needs the address, so a taken port is no
// error.
func (d *Daemon) listenForLauncher(ctx context.Context) []nbdListener {
	if d.opt.Hook == nil {
		return nil
	}
	a, ok := d.opt.Hook.Address()
	if !ok {
		return nil
	}
	lc := net.ListenConfig{KeepAliveConfig: socket.KeepAlive}
	l, err := lc.Listen(ctx, "tcp4", a.String())
	if err != nil {
		d.log.Warn("the disks have no address beside their socket: a machine of KubeVirt 1.9, in "+
			"a cluster with an object of kind Plugin, would not find them", zap.Error(err))
		return nil
	}
	d.hookPortal = libvirt.Portal{Host: a.Addr.String(), Port: a.Port}
	return []nbdListener{{l, nbd.Portal{Name: d.opt.Hook.NBD().String(), SameUser: true}}}
}

// serveNBD accepts clients at all portals of NBD, until the server is shut down. If one fails
// before, it returns the error.
func (d *Daemon) serveNBD(listeners []nbdListener) <-chan error {
	served := make(chan error, len(listeners))
	for _, l := range listeners {
		go func() {
			err := d.nbd.Serve(l.Listener, l.Portal)
			if !errors.Is(err, nbd.ErrServerClosed) {
				served <- fmt.Errorf("NBD portal %s stopped accepting clients: %w", l.Name, err)
			}
		}()
	}
	return served
}

// sessions are the sessions of all protocols.
type sessions []interface {
	Sessions() []status.Session
	EndSessions(which func(status.Session) bool) []status.Session
	Shutdown(context.Context) error
}

// sessionsWith are the sessions of all front ends.
func (d *Daemon) sessionsWith(srv *target.Server) sessions {
	all := sessions{srv, d.nbd}
	if d.vhost != nil {
		all = append(all, d.vhost)
	}
	return all
}

// shutdown ends all front ends at the same time.
func (s sessions) shutdown(ctx context.Context) error {
	stopped := make(chan error, len(s))
	for _, front := range s {
		go func() { stopped <- front.Shutdown(ctx) }()
	}
	var err error
	for range s {
		err = errors.Join(err, <-stopped)
	}
	return err
}

// Sessions implements control.Sessions.
func (s sessions) Sessions() []status.Session {
	all := []status.Session{}
	for _, front := range s {
		all = append(all, front.Sessions()...)
	}
	return all
}

// EndSessions implements control.Sessions.
func (s sessions) EndSessions(which func(status.Session) bool) (all []status.Session) {
	for _, front := range s {
		all = append(all, front.EndSessions(which)...)
	}
	return all
}
