package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/instance"
)

// explainVolume says what to do where the persistent directory is none.
func explainVolume(err error, dir string) error {
	what, action := "", "mount the volume there, or name the directory where it is mounted with"
	switch {
	case errors.As(err, new(*instance.PersistentError)):
		return err
	case errors.Is(err, fs.ErrNotExist):
		what = "does not exist, and is not made, as what is written there would not survive"
	case errors.Is(err, syscall.ENOTDIR):
		what = "is no directory"
	case errors.Is(err, fs.ErrPermission):
		what = fmt.Sprintf("cannot be used by user %d", os.Geteuid())
	default:
		what = "cannot be used"
	}
	return fmt.Errorf("the persistent directory %q %s: %s %s: %w",
		dir, what, action, nameOf(keyPersistentDir), withoutPath(err))
}

// warnWithoutVolume tells of a persistent directory that dies with the container: one that was made in its own layer because the volume was
// forgotten or is mounted elsewhere, or one in memory. The disks are served all the same, as somebody may be trying things out.
func (d *daemon) warnWithoutVolume() {
	var st unix.Statfs_t
	if d.cfg.persistentDir == "" || unix.Statfs(d.cfg.persistentDir, &st) != nil {
		return
	}
	if where := volatilePlace(int64(st.Type)); where != "" {
		d.log.Warn("the persistent disks will be lost: their directory is "+where+", and not on a volume", zap.String("directory", d.cfg.persistentDir))
	}
}

// volatilePlace is where a file system of that type has its files, if they die with the container or the machine; else "".
func volatilePlace(fsType int64) string {
	switch fsType {
	case unix.OVERLAYFS_SUPER_MAGIC:
		return "in the container's own layer"
	case unix.TMPFS_MAGIC, unix.RAMFS_MAGIC:
		return "in memory"
	}
	return ""
}
