package main

import (
	bigendian "encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/adapter"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/adapt"
)

// checkWritable looks at the disk of an earlier call, which holds the machine's writes, and changes
// nothing. rebase names the top level under it that has to be replaced; "": none. It is an error if
// the disk belongs to other layers.
func checkWritable(path string, made *adapt.Made) (rebase string, err error) {
	// This is asked first: another call may make the disk at any moment, and image.Open may also
	// mean a level that is missing.
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	img, err := image.Open(path, image.Options{})
	if err != nil {
		return "", err
	}
	defer img.Close()
	var below, want []string
	for _, file := range img.Info().BackingChain {
		below = append(below, filepath.Base(file.Name))
	}
	for _, level := range slices.Backward(made.Levels) {
		want = append(want, level.File)
	}
	if len(below) != len(want) || !slices.Equal(below[1:], want[1:]) ||
		!adapter.IsLevel(below[0]) || len(below[0]) != len(want[0]) {
		return "", fmt.Errorf("%q holds the writes of a machine from another version of the "+
			"image: "+
			"move it away, or name another directory with --%s", path, flagTo)
	}
	if img.Size() < made.Size {
		return "", fmt.Errorf("%q has %s, and --%s asks for %s: shut the machine down, and run "+
			"\"qemu-img resize %s %d\" first", path, shortSize(img.Size()), keySize,
			shortSize(made.Size), path, made.Size)
	}
	if below[0] == want[0] {
		return "", nil
	}
	return below[0], nil
}

// rebaseWritable puts the machine's writes upon another top level, which differs from the one
// before in the configuration only. The names have the same length, so this is one write into the
// header: the guest never writes where the configuration is.
func rebaseWritable(path, before, top string) (err error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	// QEMU holds locks on these bytes while it uses an image. Until f is closed, none can start.
	const first, many = 100, 200
	lock := unix.Flock_t{Type: unix.F_WRLCK, Start: first, Len: many}
	err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lock)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%q is in use by a running machine: shut it down, and try again", path)
	}
	if err != nil {
		return fmt.Errorf("lock %q: %w", path, err)
	}
	var head [20]byte
	if _, err := f.ReadAt(head[:], 0); err != nil {
		return err
	}
	at := int64(bigendian.BigEndian.Uint64(head[8:]))
	name := make([]byte, len(before))
	if _, err := f.ReadAt(name, at); err != nil {
		return err
	}
	if int(bigendian.BigEndian.Uint32(head[16:])) != len(before) || string(name) != before ||
		len(top) != len(before) || strings.ContainsRune(top, '/') {
		return fmt.Errorf("%q names its backing file in another way than %q: run \"qemu-img "+
			"rebase "+
			"-u -F qcow2 -b %s %s\"", path, before, top, path)
	}
	if _, err := f.WriteAt([]byte(top), at); err != nil {
		return err
	}
	return f.Sync()
}
