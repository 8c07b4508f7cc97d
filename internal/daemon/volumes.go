package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/metrics"
	"kubevirt.io/disk/pages"
	"kubevirt.io/disk/volume"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/server"
	"kubevirt.io/disk/volume/store"
	"kubevirt.io/disk/volume/upload"
)

// Volumes are the options for volumes on demand. Listen is required.
type Volumes struct {
	Listen Address
	Access server.Access // who may send requests
	// Dir keeps the volumes; it is made if it is missing. "": volumesName in the persistent
	// directory, or in the work directory if there is none.
	Dir string
	// Portal is the address of the LUNs, as HOST:PORT. "": the portal's own, or the address at
	// which a client has reached the daemon.
	Portal   string
	Max      int               // volumes at once; 0: no limit
	MaxBytes int64             // of all of them; 0: no limit
	Claims   map[string]string // directories of claims, by their names
}

// volumesName is the directory of the volumes, inside that of the disks.
const volumesName = ".volumes"

// volumes has everything that a daemon needs to make volumes.
type volumes struct {
	manager  *volume.Manager
	server   *server.Server
	uploads  *upload.Handler
	listener net.Listener
	loading  atomic.Bool // they are being served at the start
	served   chan error  // gets the end of server.Serve; nil: it has not begun
}

// openVolumes finds the existing volumes, and binds the address for requests. It serves nothing
// yet.
func (d *Daemon) openVolumes(ctx context.Context) (err error) {
	opt := d.opt.Volumes
	if opt == nil {
		return nil
	}
	if d.opt.PersistentDir != "" {
		// A new one would not survive. It must not be made with the directory of the volumes in it.
		if dir, err := os.Open(d.opt.PersistentDir); err != nil {
			return d.explainVolume(err)
		} else if err = dir.Close(); err != nil {
			return err
		}
	}
	log := d.log.Named("volumes")
	v := &volumes{}
	v.listener, err = listen(ctx, opt.Listen, []Address{opt.Listen})
	if err != nil {
		return d.names.explainListen(err, "address of the volumes", opt.Listen, SettingVolumes)
	}
	d.mu.Lock()
	d.volumes = v
	d.mu.Unlock()
	manager, err := volume.New(volume.Options{Dir: d.volumesDir(),
		Disks: &volumeDisks{d: d}, Max: opt.Max, MaxBytes: opt.MaxBytes, Log: log})
	if err != nil {
		return fmt.Errorf("%w; name another directory with %v", err,
			d.names.of(SettingVolumesDir))
	}
	uploads := d.newUploads(v, manager, log)
	d.mu.Lock()
	v.manager, v.uploads = manager, uploads
	d.mu.Unlock()
	d.metrics.SetVolumes(func() metrics.Volumes {
		s := d.volumesStatus()
		return metrics.Volumes{States: s.States, Bytes: s.Bytes}
	})
	v.server, err = server.New(server.Options{Volumes: manager, Uploads: v.uploads,
		TargetName: d.opt.TargetName, Portal: d.portalFor, Access: opt.Access, Log: log})
	if err == nil {
		d.log.Info("volumes", zap.String("address", v.listener.Addr().String()),
			zap.String("directory", d.volumesDir()), zap.Int("volumes", len(manager.List())))
	}
	return err
}

// hasSingle reports whether a volume lies in the persistent directory.
func (d *Daemon) hasSingle() bool {
	return d.volumes != nil && d.volumes.manager.Has(store.Place{Kind: store.PlaceRoot})
}

// volumesStatus returns the volumes for the page; nil if there are none.
func (d *Daemon) volumesStatus() *pages.VolumesStatus {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.volumes == nil || d.volumes.manager == nil {
		return nil
	}
	t := d.volumes.manager.Totals()
	s := &pages.VolumesStatus{Address: d.volumes.listener.Addr().String(),
		States: map[string]int{}, Bytes: t.Bytes, Max: t.Max, MaxBytes: t.MaxBytes,
		Uploads: uploadsStatus(d.volumes.uploads)}
	for state, n := range t.States {
		s.States[string(state)] = n
	}
	if t.States[api.StateFailed] > 0 {
		for _, v := range d.volumes.manager.List() {
			if v.State == api.StateFailed {
				s.Failed = append(s.Failed, pages.FailedVolume{Name: v.Record.Name,
					Failure: v.Failure})
			}
		}
	}
	return s
}

func (d *Daemon) volumesDir() string {
	switch {
	case d.opt.Volumes.Dir != "":
		return d.opt.Volumes.Dir
	case d.opt.PersistentDir != "":
		return filepath.Join(d.opt.PersistentDir, volumesName)
	}
	return filepath.Join(d.opt.WorkDir, volumesName)
}

// serveVolumes serves the existing volumes.
func (d *Daemon) serveVolumes(ctx context.Context) error {
	if d.volumes == nil {
		return nil
	}
	d.volumes.loading.Store(true)
	err := d.volumes.manager.Load(ctx)
	d.volumes.loading.Store(false)
	if err == nil {
		d.recoverUploads(ctx)
	}
	d.measure()
	return err
}

// answerVolumes begins to answer requests for volumes.
func (d *Daemon) answerVolumes() {
	v := d.volumes
	if v == nil {
		return
	}
	v.served = make(chan error, 1)
	go func() { v.served <- v.server.Serve(v.listener) }()
	go d.expireUploads()
}

// volumesGrace is how long a stop waits for requests for volumes. Sessions need the rest of the
// time. An unfinished request is undone, and an upload can be resumed later.
const volumesGrace = 2 * time.Second

// closeVolumes ends requests for volumes, before the disks are closed. It may be called if
// openVolumes has failed or was not called.
func (d *Daemon) closeVolumes(ctx context.Context) (err error) {
	v := d.volumes
	if v == nil {
		return nil
	}
	if v.served != nil {
		ctx, cancel := context.WithTimeout(ctx, volumesGrace)
		defer cancel()
		err := within(ctx, "upload", func() error { v.uploads.Close(); return nil })
		if err != nil {
			d.log.Warn("uploads were cut off", zap.Error(err))
		}
		if err := v.server.Shutdown(ctx); err != nil {
			d.log.Warn("requests for volumes were cut off", zap.Error(err))
		}
		if err := <-v.served; !errors.Is(err, http.ErrServerClosed) {
			d.log.Warn("requests for volumes were not answered any more", zap.Error(err))
		}
		v.served = nil
	}
	closeAll([]net.Listener{v.listener})
	if v.manager != nil {
		err = within(ctx, "end", v.manager.Close)
	}
	return err
}

// portalFor is the address of the LUNs for a client that has reached a local address.
func (d *Daemon) portalFor(local net.Addr) (host, port string) {
	if host, port, err := net.SplitHostPort(d.opt.Volumes.Portal); err == nil {
		return host, port
	}
	d.mu.Lock()
	bound := slices.Clone(d.portals)
	d.mu.Unlock()
	for _, portal := range bound {
		if host, port, err := net.SplitHostPort(portal); err == nil {
			if ip := net.ParseIP(host); ip != nil && !ip.IsUnspecified() {
				return host, port
			}
			if tcp, ok := local.(*net.TCPAddr); ok {
				return tcp.IP.String(), port
			}
			host, port, _ = net.SplitHostPort(Reachable(portal))
			return host, port
		}
	}
	return "localhost", strconv.Itoa(3260)
}

// volumeDisks makes and serves the disks of volumes.
type volumeDisks struct{ d *Daemon }

// Default is a volume from the only image, or an empty one of the size in the settings.
func (v *volumeDisks) Default() (api.Spec, error) {
	size := api.Size(v.d.opt.Settings.Disk.Size)
	switch found := v.d.found; {
	case len(found) == 1 && found[0].streamed != nil:
		ref := v.d.opt.Streams.References[0].String()
		return api.Spec{Size: size, From: &api.Source{Reference: ref}}, nil
	case len(found) == 1 && found[0].image != nil:
		return api.Spec{Size: size, From: &api.Source{Image: found[0].name}}, nil
	case len(found) > 1:
		names := make([]string, len(found))
		for i, f := range found {
			names[i] = f.name
		}
		return api.Spec{}, api.Errorf(api.CodeInvalid, "from: name the source of the volume: "+
			"there are several images, %s", strings.Join(names, ", "))
	case size == 0:
		return api.Spec{}, api.Errorf(api.CodeInvalid, "size: give a size such as 20Gi: there is "+
			"no image")
	}
	return api.Spec{Size: size}, nil
}

// Place returns a directory that holds disks.
func (v *volumeDisks) Place(p store.Place) (string, error) {
	switch p.Kind {
	case store.PlaceRoot:
		if dir := v.d.opt.PersistentDir; dir != "" {
			return dir, nil
		}
		return "", fmt.Errorf("the disk lies in the persistent directory, but none is set: name "+
			"it with %v", v.d.names.of(SettingPersistentDir))
	case store.PlaceClaim:
		return v.claim(p.Name)
	case store.PlaceUsageType:
		dir, err := v.d.opt.UsageTypes.Dir(p.Name)
		if err != nil {
			return "", api.Errorf(api.CodeInvalid, "copy.usage-type: %v", err)
		}
		return dir, nil
	}
	return "", fmt.Errorf("there is no place %q", p.Kind)
}

// claim returns the directory of a claim.
func (v *volumeDisks) claim(name string) (string, error) {
	claims := v.d.opt.Volumes.Claims
	if dir, ok := claims[name]; ok {
		return dir, nil
	}
	known := "there are none"
	if len(claims) > 0 {
		known = "use one of " + strings.Join(slices.Sorted(maps.Keys(claims)), ", ")
	}
	return "", api.Errorf(api.CodeInvalid, "pvc.claimname: no claim %q is mounted here: %s (%v)",
		name, known, v.d.names.of(SettingVolumesClaim))
}

// Single reports whether the persistent directory is for one disk, and has none.
func (v *volumeDisks) Single() bool {
	dir := v.d.opt.PersistentDir
	return dir != "" && len(v.d.found) == 0 && !instance.HasPersistent(dir)
}

// Taken reports whether a disk has the LUN.
func (v *volumeDisks) Taken(lun uint16) bool { return v.d.disks.has(lun) }
