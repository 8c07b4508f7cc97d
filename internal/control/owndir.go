package control

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/socket"
)

// The runtime directory of a user has a directory for each daemon, with its sockets. There the
// user's commands find the daemon without a setting.

const (
	runtimeName = "kubevirt-disk"
	dirPrefix   = "daemon-"
)

// OwnDir is the directory of a running daemon.
type OwnDir struct{ *flock.OwnDir }

// Socket is the path of the control socket in it.
func (p *OwnDir) Socket() string { return socketIn(p.Path) }

func socketIn(dir string) string { return filepath.Join(dir, "control.sock") }

// NBD is the path for a socket of NBD in it.
func (p *OwnDir) NBD() string { return filepath.Join(p.Path, "nbd.sock") }

// Remove removes the directory with everything in it. p may be nil.
func (p *OwnDir) Remove() error {
	if p == nil {
		return nil
	}
	return p.OwnDir.Remove()
}

// runtimeDirs are the possible runtime directories, the best first. If XDG_RUNTIME_DIR is not the
// usual one, it is the only one: its user wants to be apart from others.
func runtimeDirs() (dirs []string) {
	own, user := os.Getenv("XDG_RUNTIME_DIR"), fmt.Sprintf("/run/user/%d", os.Geteuid())
	// Everybody can write to the last one: usable checks its owner.
	last := filepath.Join(os.TempDir(), fmt.Sprintf("%s-%d", runtimeName, os.Geteuid()))
	if filepath.IsAbs(own) && filepath.Clean(own) != user {
		return []string{filepath.Join(own, runtimeName), last}
	}
	dirs = []string{filepath.Join(user, runtimeName)}
	if os.Geteuid() == 0 {
		dirs = append(dirs, filepath.Join("/run", runtimeName))
	}
	return append(dirs, last)
}

// usable checks a runtime directory, and makes it if make is set. It must be this user's alone, and
// nobody else may be able to replace it.
func usable(dir string, make bool) error {
	if make {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	// A link to a directory of this user is refused.
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var own, above unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &own); err != nil {
		return err
	}
	if err := unix.Fstatat(int(f.Fd()), "..", &above, 0); err != nil {
		return err
	}
	user := uint32(os.Geteuid())
	switch {
	case own.Uid != user || own.Mode&0o077 != 0:
		return fmt.Errorf("%q is not only for user %d: remove it, or set XDG_RUNTIME_DIR to "+
			"another directory", dir, user)
	case above.Uid != user && above.Uid != 0, above.Mode&0o022 != 0 && above.Mode&unix.S_ISVTX == 0:
		return fmt.Errorf("%q is in a directory in which others can replace it: set "+
			"XDG_RUNTIME_DIR to another one", dir)
	}
	return nil
}

// NewOwnDir makes the directory of this daemon, in the first possible place.
func NewOwnDir() (*OwnDir, error) {
	var errs []error
	for _, dir := range runtimeDirs() {
		p, err := ownDirIn(dir)
		if err == nil {
			return p, nil
		}
		errs = append(errs, err)
	}
	return nil, fmt.Errorf("there is no runtime directory: %w", errors.Join(errs...))
}

func ownDirIn(dir string) (*OwnDir, error) {
	if err := usable(dir, true); err != nil {
		return nil, err
	}
	own, err := flock.NewOwnDir(dir, dirPrefix)
	if err != nil {
		return nil, err
	}
	p := &OwnDir{own}
	if len(p.Socket()) > socket.MaxAddress {
		return nil, errors.Join(fmt.Errorf("%q is too long for a socket", p.Socket()), p.Remove())
	}
	return p, nil
}

// Sockets are the control sockets of this user's running daemons. It removes directories of killed
// daemons.
func Sockets() (found []string) {
	for _, dir := range runtimeDirs() {
		if usable(dir, false) != nil {
			continue // no daemon can be there
		}
		for _, own := range flock.OwnDirs(dir, dirPrefix) {
			found = append(found, socketIn(own))
		}
	}
	return found
}
