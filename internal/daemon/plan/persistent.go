package plan

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/osfile"
)

// CheckPersistent refuses a persistent directory that cannot be used. There may be none.
func CheckPersistent(opt *options.Options) error {
	if opt.PersistentDir == "" {
		return nil
	}
	dir, err := os.OpenFile(opt.PersistentDir, os.O_RDONLY|syscall.O_DIRECTORY, 0)
	if err != nil {
		return explainPersistent(opt, err)
	}
	return dir.Close()
}

// explainPersistent says what to do if the persistent directory cannot be used.
func explainPersistent(opt *options.Options, err error) error {
	var what string
	switch {
	case errors.As(err, new(*instance.PersistentError)):
		return err
	case errors.Is(err, fs.ErrNotExist):
		what = "does not exist, and a new one would not survive"
	case errors.Is(err, syscall.ENOTDIR):
		what = "is not a directory"
	case errors.Is(err, fs.ErrPermission):
		what = fmt.Sprintf("cannot be used by user %d", os.Geteuid())
	default:
		what = "cannot be used"
	}
	return fmt.Errorf("the persistent directory %q %s: mount the volume there, or name the "+
		"directory where it is mounted with %v: %w",
		opt.PersistentDir, what, opt.Setting(&opt.PersistentDir), osfile.WithoutPath(err))
}

// warnWithoutVolume warns of a persistent directory that is lost with the container. It may be in
// the container's own layer, because the volume was forgotten or is mounted elsewhere, or in
// memory. The disks are served nevertheless: a person may be trying things out.
func (p *Plan) warnWithoutVolume() {
	var st unix.Statfs_t
	if p.opt.PersistentDir == "" || unix.Statfs(p.opt.PersistentDir, &st) != nil {
		return
	}
	if where := volatilePlace(int64(st.Type)); where != "" {
		p.opt.Log.Warn("the persistent disks will be lost: their directory is "+where+
			", not on a volume", zap.String("directory", p.opt.PersistentDir))
	}
}

// volatilePlace describes where a file system of this type keeps its files, if they are lost with
// the container or the machine. Otherwise it returns "".
func volatilePlace(fsType int64) string {
	switch fsType {
	case unix.OVERLAYFS_SUPER_MAGIC:
		return "in the container's own layer"
	case unix.TMPFS_MAGIC, unix.RAMFS_MAGIC:
		return "in memory"
	}
	return ""
}
