package sources

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"path"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/nbd"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

const (
	// remoteTimeout is how long a server may be unreachable while the daemon starts.
	remoteTimeout = time.Minute
	remotePause   = time.Second
)

// findRemotes connects to the disks of other servers. After an error the caller closes those that
// were found.
func (s *Sources) findRemotes(ctx context.Context) (found []plan.Disk, err error) {
	defer s.begin(serving.Source{})
	for _, u := range s.opt.Remotes.Disks {
		source := s.remoteSource(u)
		s.begin(source)
		r, err := s.openRemote(ctx, u)
		if err != nil {
			return found, err
		}
		name := cmp.Or(u.Export, r.Name(), u.Address)
		source.Why = r.Why
		found = append(found, plan.Disk{Name: path.Base(name), Source: source,
			AlreadyOpen: instance.WithoutFiles(r, r.Identity(), r.BlockSize(), r.ReadOnly())})
	}
	return found, nil
}

// remoteSource tells people which server has a disk.
func (s *Sources) remoteSource(u options.Remote) serving.Source {
	name := "the NBD server " + u.Address
	if u.Export != "" {
		name += fmt.Sprintf(" (export %q)", u.Export)
	}
	return serving.Source{Kind: status.TroubleServer, Name: name,
		Why: func() (string, time.Time) {
			s.mu.Lock()
			defer s.mu.Unlock()
			last := s.last[u.Address]
			return last.text, last.at
		}}
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
		s.noteLast(u.Address, err)
		s.opt.Log.Warn("a disk's server cannot be reached yet: trying again", zap.Error(err))
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(remotePause):
		}
	}
}
