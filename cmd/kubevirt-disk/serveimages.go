package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/daemon"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/words"
	"kubevirt.io/disk/status"
)

// "serve IMAGE..." has defaults for a person at a terminal, other than "serve" in a container:
// nothing stays on the machine, nothing has to be set up, and the terminal shows how to log in.

// useImages serves the named images instead of a directory, with defaults for a person at a
// terminal.
func (l loader) useImages(c *config, images []string) {
	c.images = images
	if l.Flags.Changed(keyDiskDir) {
		l.Problems.Add("--"+keyDiskDir, "cannot be combined with images as arguments, such as "+
			"%q: use one of them", images[0])
	}
	for _, path := range images {
		switch info, err := os.Stat(path); {
		case path == standardStream:
			l.Problems.AddError(checkSource(path))
		case errors.Is(err, fs.ErrNotExist):
			l.Problems.Add("serve", "%q does not exist: name images that are there, or their "+
				"directory with --%s, or one in a registry or at an address with --%s", path,
				keyDiskDir, flagImage)
		case err == nil && info.IsDir():
			l.Problems.Add("serve", "%q is a directory: --%s=%s serves the images in it", path,
				keyDiskDir, path)
		}
	}
	if l.Source(keyReadyFile) == "" {
		c.ReadyFile = ""
	}
	if l.Source(keyWorkDir) == "" && c.Hook == nil {
		l.useTemporary(c)
	}
}

// noneFor reports whether a directory does not exist and this user cannot make it. In a container
// it exists; if it is read-only there, that is a mistake.
func noneFor(dir string) bool {
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		return false
	}
	above := filepath.Dir(dir)
	if _, err := os.Stat(above); errors.Is(err, fs.ErrNotExist) && above != dir {
		return noneFor(above)
	}
	return unix.Access(above, unix.W_OK) != nil
}

// useTemporary keeps nothing after the end.
func (l loader) useTemporary(c *config) {
	c.temporary = true
	if l.Source(keyCopyMode) == "" && c.PersistentDir == "" {
		c.Settings.Disk.CopyMode = instance.CopyOnWrite
	}
}

// makeTemporary makes the work directory if none was named. remove removes it with its content.
func (c *config) makeTemporary() (remove func() error, err error) {
	if !c.temporary {
		return func() error { return nil }, nil
	}
	own, err := temporaryDir()
	if err != nil {
		return nil, fmt.Errorf("a temporary work directory cannot be made: name one with %s: %w",
			nameOf(keyWorkDir), err)
	}
	if rel, err := filepath.Rel(c.WorkDir, c.ControlSocket); err == nil && c.ControlSocket != "" &&
		filepath.IsLocal(rel) {
		c.ControlSocket = filepath.Join(own.Path, rel)
	}
	if rel, err := filepath.Rel(c.WorkDir, c.Streams.CacheDir); err == nil &&
		filepath.IsLocal(rel) {
		c.Streams.CacheDir = filepath.Join(own.Path, rel)
		c.Containers.Dir = filepath.Join(c.Streams.CacheDir, levelsName)
	}
	c.WorkDir = own.Path
	return own.Remove, nil
}

const temporaryPrefix = "serve-"

// temporaryDir makes a directory in the user's cache, and removes those of killed daemons. It uses
// /tmp only if it cannot write to a cache: /tmp may be in memory, and everybody can write there.
func temporaryDir() (own *flock.OwnDir, err error) {
	cache, err := os.UserCacheDir()
	if dir := filepath.Join(cache, "kubevirt-disk"); err == nil {
		if err = os.MkdirAll(dir, 0o700); err == nil {
			own, err = flock.NewOwnDir(dir, temporaryPrefix)
		}
	}
	if err != nil {
		return flock.TemporaryDir()
	}
	return own, nil
}

// guide describes the disks to a person, and how to log in.
func (s *served) guide(background bool) string {
	now := s.daemon.Status()
	var b strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	password := "without a password, which CHAP_USERNAME and CHAP_PASSWORD would set"
	if s.cfg.CHAP.Enabled() {
		password = "with CHAP: let the clients read the password from LIBISCSI_CHAP_PASSWORD"
	}
	switch {
	case len(now.Portals) > 0:
		say("Serving as %s, %s:", now.TargetName, password)
	case len(now.NBDPortals) > 0:
		say("Serving by NBD:")
	default:
		say("Serving by vhost-user:")
	}
	for _, l := range now.LUNs {
		say("  LUN %d  %q  %s", l.LUN, l.Image, console.ShortSize(l.SizeBytes))
	}
	say("%s", s.whatStays(now.LUNs))
	if len(now.NBDPortals) > 0 {
		say("By NBD:\n\n  qemu-img convert -O raw '%s' copy.raw\n",
			daemon.NBDURI(&now, &now.LUNs[0]))
	}
	if at := now.LUNs[0].VhostUser; at != "" {
		say("By vhost-user:\n\n  kubevirt-disk xml --vhost-user %s\n",
			words.Shell(at))
	}
	if len(now.Portals) > 0 {
		s.guideISCSI(say, &now)
	}
	if at := s.daemon.PagesAddress(); at != "" {
		say("\nPage: http://%s/ (for programs: http://%[1]s/status)", options.Reachable(at))
	}
	if background {
		say("kill %d ends it.", os.Getpid())
	} else {
		say("Ctrl-C ends it.")
	}
	return console.Harmless(b.String())
}

// guideISCSI describes how to log in by iSCSI.
func (s *served) guideISCSI(say func(string, ...any), now *status.Status) {
	portal, user := options.Reachable(now.Portals[0]), s.cfg.CHAP.Initiator.Username
	disk := daemon.ISCSIURI(now, user, now.LUNs[0].LUN)
	say("Log in from another terminal:\n")
	if !s.cfg.BehindNAT { // a discovery names no address then, and iscsi-ls lists nothing
		say("  iscsi-ls -s %s", daemon.ISCSIURI(now, user, 0))
	}
	say("  qemu-io -r -f raw -c 'read -v 0 512' %s", disk)
	say("  qemu-img convert -O raw %s copy.raw", disk)
	say("\nAs a disk of this machine (root, package open-iscsi):\n")
	say("  iscsiadm -m discovery -t sendtargets -p %s", portal)
	say("  iscsiadm -m node -T %s -p %s --login", now.TargetName, portal)
	say("  iscsiadm -m node -T %s -p %s --logout", now.TargetName, portal)
}

// whatStays describes whether written data is kept.
func (s *served) whatStays(luns []status.LUN) string {
	inPlace := false
	for _, l := range luns {
		inPlace = inPlace || l.CopyMode == string(instance.CopyNone)
	}
	switch {
	case inPlace:
		return "In copy mode none, writes go to the images themselves."
	case s.cfg.PersistentDir != "":
		return fmt.Sprintf("The images are not changed. Writes stay in %q.", s.cfg.PersistentDir)
	case s.cfg.temporary:
		return fmt.Sprintf("The images are not changed. Writes go to %q, which is removed at the "+
			"end; --%s=DIR keeps them.", s.cfg.WorkDir, keyWorkDir)
	}
	return fmt.Sprintf("The images are not changed. Writes stay in %q, for the next start with "+
		"the same images.", s.cfg.WorkDir)
}
