package sources

import (
	"cmp"
	"context"
	"crypto/tls"
	"path"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/nbd"
)

const (
	// remoteTimeout is how long a server may be unreachable while the daemon starts.
	remoteTimeout = time.Minute
	remotePause   = time.Second
)

// findRemotes connects to the disks of other servers. After an error the caller still closes what
// was found.
func (s *Sources) findRemotes(ctx context.Context) (found []plan.Disk, err error) {
	for _, u := range s.opt.Remotes.Disks {
		r, err := s.openRemote(ctx, u)
		if err != nil {
			return found, err
		}
		name := cmp.Or(u.Export, r.Name(), u.Address)
		found = append(found, plan.Disk{Name: path.Base(name),
			AlreadyOpen: instance.WithoutFiles(r, r.Identity(), r.BlockSize(), r.ReadOnly())})
	}
	return found, nil
}

// openRemote connects to a disk. It tries again for a while if the server cannot be reached: it may
// start at the same time.
func (s *Sources) openRemote(ctx context.Context, u options.Remote) (*nbd.Remote, error) {
	files := &s.opt.Remotes
	opt := nbd.RemoteOptions{Address: u.Address, Export: u.Export, Log: s.opt.Log.Named("remote")}
	_, opt.Keep = s.opt.MemoryFor()
	if u.TLS {
		opt.TLS = func() (*tls.Config, error) {
			return nbd.LoadClientTLS(files.Cert, files.Key, files.ServerCA, u.Host)
		}
	}
	for began := time.Now(); ; {
		r, err := nbd.OpenRemote(ctx, opt)
		if err == nil {
			return r, nil
		}
		if !nbd.Unreachable(err) || time.Since(began) > remoteTimeout {
			return nil, err
		}
		s.opt.Log.Warn("a disk's server cannot be reached yet: trying again", zap.Error(err))
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(remotePause):
		}
	}
}
