package volumes

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/internal/daemon/served"
	"kubevirt.io/disk/internal/daemon/sources"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/volume"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/server"
	"kubevirt.io/disk/volume/store"
	"kubevirt.io/disk/volume/upload"
)

// Volumes are the volumes of one daemon.
type Volumes struct {
	opt      *options.Options
	log      *zap.Logger
	disks    *served.Disks
	opener   *opener
	portals  func() []string // of the daemon, as bound
	listener net.Listener
	manager  *volume.Manager
	server   *server.Server
	uploads  *upload.Handler

	served chan error // gets the end of server.Serve; nil: it has not begun
}

// New finds the existing volumes. It serves nothing yet. Requests will come by the listener l,
// which belongs to the volumes from now on, even after an error. portals returns the daemon's
// portals.
func New(opt *options.Options, l net.Listener, disks *served.Disks, from *sources.Sources,
	portals func() []string) (_ *Volumes, err error) {
	v := &Volumes{opt: opt, log: opt.Log.Named("volumes"), disks: disks,
		opener: &opener{opt: opt, disks: disks, sources: from}, portals: portals, listener: l}
	defer func() {
		if err != nil {
			err = errors.Join(err, v.Close(context.Background()))
		}
	}()
	v.manager, err = volume.New(volume.Options{Dir: opt.VolumesDir(), Disks: v.opener,
		Max: opt.Volumes.Max, MaxBytes: opt.Volumes.MaxBytes, Log: v.log})
	if err != nil {
		return nil, fmt.Errorf("%w; name another directory with %v", err,
			opt.Setting(&opt.Volumes.Dir))
	}
	disks.ServeVolumes(v.manager.ID())
	v.uploads = v.newUploads()
	v.opener.uploads = v.uploads
	v.server, err = server.New(server.Options{Volumes: v.manager, Uploads: v.uploads,
		TargetName: opt.TargetName, Portal: v.portalFor, Access: opt.Volumes.Access, Log: v.log})
	if err != nil {
		return nil, err
	}
	opt.Log.Info("volumes", zap.String("address", l.Addr().String()),
		zap.String("directory", opt.VolumesDir()), zap.Int("volumes", len(v.manager.List())))
	return v, nil
}

// Holds returns the places, numbers and names of volumes.
func (v *Volumes) Holds() (all plan.Volumes) {
	if v == nil {
		return all
	}
	all.Single = v.manager.Has(store.Place{Kind: store.PlaceRoot})
	all.LUNs = map[uint16]string{}
	for _, one := range v.manager.List() {
		all.Names = append(all.Names, one.Record.Name)
		if one.Record.LUN != 0 {
			all.LUNs[one.Record.LUN] = one.Record.Name
		}
		if n := serving.NumberIn(one.Record.Name); n != 0 {
			all.LUNs[n] = one.Record.Name
		}
	}
	return all
}

// Status returns the volumes for the page; nil if there are none.
func (v *Volumes) Status() *status.Volumes {
	if v == nil {
		return nil
	}
	t := v.manager.Totals()
	s := &status.Volumes{Address: v.listener.Addr().String(), States: map[string]int{},
		Bytes: t.Bytes, Max: t.Max, MaxBytes: t.MaxBytes, Uploads: v.uploads.Receiving()}
	for state, n := range t.States {
		s.States[string(state)] = n
	}
	if t.States[api.StateFailed] > 0 {
		for _, one := range v.manager.List() {
			if one.State == api.StateFailed {
				s.Failed = append(s.Failed, status.FailedVolume{Name: one.Record.Name,
					Failure: one.Failure})
			}
		}
	}
	return s
}

// Serve makes LUNs of the existing volumes, in addition to the disks that were found.
func (v *Volumes) Serve(ctx context.Context, found []plan.Disk) error {
	if v == nil {
		return nil
	}
	v.opener.found = found
	v.opener.loading.Store(true)
	err := v.manager.Load(ctx)
	v.opener.loading.Store(false)
	if err == nil {
		v.recoverUploads(ctx)
	}
	return err
}

// Answer begins to answer requests for volumes.
func (v *Volumes) Answer() {
	if v == nil {
		return
	}
	v.served = make(chan error, 1)
	go func() { v.served <- v.server.Serve(v.listener) }()
	go v.expireUploads()
}

// grace is how long a stop waits for requests for volumes, and then for work on them, which may
// hang in storage. Sessions need the rest of the time. An unfinished request is undone, an upload
// can be resumed later, and a deletion goes on at the next start.
const grace = 2 * time.Second

// Close ends requests for volumes, before the disks are closed. It may be called again.
func (v *Volumes) Close(ctx context.Context) (err error) {
	if v == nil {
		return nil
	}
	if v.served != nil {
		ctx, cancel := context.WithTimeout(ctx, grace)
		defer cancel()
		err := served.Within(ctx, "upload", func() error { v.uploads.Close(); return nil })
		if err != nil {
			v.opt.Log.Warn("uploads were cut off", zap.Error(err))
		}
		if err := v.server.Shutdown(ctx); err != nil {
			v.opt.Log.Warn("requests for volumes were cut off", zap.Error(err))
		}
		if err := <-v.served; !errors.Is(err, http.ErrServerClosed) {
			v.opt.Log.Warn("requests for volumes were not answered any more", zap.Error(err))
		}
		v.served = nil
	}
	_ = v.listener.Close() // the server may have closed it
	if v.manager != nil {
		ctx, cancel := context.WithTimeout(ctx, grace)
		defer cancel()
		err = served.Within(ctx, "end", v.manager.Close)
	}
	return err
}

// portalFor is the address of the LUNs for a client that has reached a local address; "": there is
// no iSCSI.
func (v *Volumes) portalFor(local net.Addr) (host, port string) {
	portals := v.portals()
	if host, port, err := net.SplitHostPort(v.opt.Volumes.Portal); err == nil && len(portals) > 0 {
		return host, port
	}
	for _, portal := range portals {
		if host, port, err := net.SplitHostPort(portal); err == nil {
			if ip := net.ParseIP(host); ip != nil && !ip.IsUnspecified() {
				return host, port
			}
			if tcp, ok := local.(*net.TCPAddr); ok {
				return tcp.IP.String(), port
			}
			host, port, _ = net.SplitHostPort(options.Reachable(portal))
			return host, port
		}
	}
	return "", ""
}
