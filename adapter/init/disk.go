package guestinit

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// diskTimeout is how long the disk may take to appear. A remote LUN may be slow.
const diskTimeout = 2 * time.Minute

// noDisks are the prefixes of block devices that are not disks.
var noDisks = []string{"loop", "ram", "zram", "sr", "fd", "md", "dm-", "nbd"}

// waitForDisk returns the device of the disk with a serial number, or of the only disk if the
// number is empty. prepare is called before each look.
func waitForDisk(serial string, prepare func()) (device string, err error) {
	for end := time.Now().Add(diskTimeout); ; time.Sleep(5 * time.Millisecond) {
		prepare()
		found := listDisks("/sys/block")
		if name, err := chooseDisk(found, serial); name != "" || err != nil {
			return "/dev/" + name, err
		}
		if time.Now().After(end) {
			return "", fmt.Errorf("no disk with the serial number %q has appeared in %v; "+
				"there are: %s. Give the disk of the image that number, or the kernel the "+
				"right one (kubevirt.serial=)", serial, diskTimeout, describe(found))
		}
	}
}

type blockDevice struct{ name, serial string }

func listDisks(sys string) (list []blockDevice) {
	entries, _ := os.ReadDir(sys) // not there yet
	for _, e := range entries {
		ignored := func(prefix string) bool { return strings.HasPrefix(e.Name(), prefix) }
		if !slices.ContainsFunc(noDisks, ignored) {
			list = append(list, blockDevice{e.Name(), diskSerial(filepath.Join(sys, e.Name()))})
		}
	}
	return list
}

// diskSerial is the serial number of a disk: virtio and NVMe have it as text, SCSI and ATA in a
// page of vital product data (SPC-4 7.8.18).
func diskSerial(sys string) string {
	for _, file := range []string{"serial", "device/serial"} {
		if text, err := os.ReadFile(filepath.Join(sys, file)); err == nil {
			return strings.TrimSpace(string(text))
		}
	}
	page, err := os.ReadFile(filepath.Join(sys, "device/vpd_pg80"))
	if err != nil || len(page) < 4 {
		return ""
	}
	return strings.Trim(string(page[4:]), " \x00\n")
}

// virtioSerial is how many bytes of a serial number a virtio disk has (virtio 1.2 5.2.6.1).
const virtioSerial = 20

// chooseDisk returns the name of the disk, or "" if it is not there yet.
func chooseDisk(list []blockDevice, serial string) (string, error) {
	if serial == "" {
		switch len(list) {
		case 0:
			return "", nil
		case 1:
			return list[0].name, nil
		}
		return "", fmt.Errorf("the machine has several disks, %s: say which one has the image "+
			"with kubevirt.serial= on the kernel's command line", describe(list))
	}
	for _, d := range list {
		cut := len(serial) > virtioSerial && d.serial == serial[:virtioSerial] &&
			strings.HasPrefix(d.name, "vd")
		if d.serial == serial || cut {
			return d.name, nil
		}
	}
	return "", nil
}

func describe(list []blockDevice) string {
	if len(list) == 0 {
		return "none"
	}
	var words []string
	for _, d := range list {
		words = append(words, fmt.Sprintf("%s (serial number %q)", d.name, d.serial))
	}
	return strings.Join(words, ", ")
}

// superblock has the needed fields of ext4's superblock (Documentation/filesystems/ext4/super.rst).
type superblock struct {
	blocks    uint64
	blockSize uint64
}

const (
	superOffset = 1024
	superSize   = 1024
	superMagic  = 0xef53
	feature64   = 0x80 // INCOMPAT_64BIT
)

func parseSuperblock(b []byte) (s superblock, err error) {
	if len(b) < superSize || binary.LittleEndian.Uint16(b[0x38:]) != superMagic {
		return s, errors.New("it has no ext4 file system: was it made by kubevirt-disk adapt?")
	}
	shift := binary.LittleEndian.Uint32(b[0x18:])
	if shift > 6 { // 64 KiB, the largest block
		return s, fmt.Errorf("its file system has blocks of 2^%d KiB", shift)
	}
	s.blockSize = 1024 << shift
	s.blocks = uint64(binary.LittleEndian.Uint32(b[4:]))
	if binary.LittleEndian.Uint32(b[0x60:])&feature64 != 0 {
		s.blocks |= uint64(binary.LittleEndian.Uint32(b[0x150:])) << 32
	}
	return s, nil
}

// mounted is the disk in use.
type mounted struct {
	device   string
	dir      string
	readOnly bool
}

// mountDisk mounts the disk, and grows its file system if the disk is larger. growth is the error
// of growing; the disk can be used in spite of it.
func mountDisk(device, dir string) (m mounted, growth, err error) {
	m = mounted{device: device, dir: dir}
	f, err := os.Open(device)
	if err != nil {
		return m, nil, err
	}
	defer f.Close()
	b := make([]byte, superSize)
	if _, err := f.ReadAt(b, superOffset); err != nil {
		return m, nil, fmt.Errorf("disk %s: %w", device, err)
	}
	super, err := parseSuperblock(b)
	if err != nil {
		return m, nil, fmt.Errorf("disk %s: %w", device, err)
	}
	if locked, err := unix.IoctlGetInt(int(f.Fd()), unix.BLKROGET); err == nil && locked != 0 {
		m.readOnly = true
	}
	if err := m.mount(); err != nil {
		return m, nil, fmt.Errorf("disk %s cannot be mounted: %w", device, err)
	}
	if m.readOnly {
		return m, nil, nil
	}
	size, err := f.Seek(0, 2)
	if err != nil {
		return m, err, nil
	}
	return m, grow(dir, super, uint64(size)), nil
}

func (m *mounted) mount() error {
	if !m.readOnly {
		return unix.Mount(m.device, m.dir, "ext4", 0, "errors=remount-ro")
	}
	err := unix.Mount(m.device, m.dir, "ext4", unix.MS_RDONLY, "")
	if err != nil {
		// A read-only disk cannot replay its journal.
		err = unix.Mount(m.device, m.dir, "ext4", unix.MS_RDONLY, "noload")
	}
	return err
}

// resizeFS is EXT4_IOC_RESIZE_FS: _IOW('f', 16, __u64).
const resizeFS = 0x40086610

// grow makes a mounted file system as large as its disk. size in bytes.
func grow(dir string, super superblock, size uint64) error {
	blocks := size / super.blockSize
	if blocks <= super.blocks {
		return nil
	}
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), resizeFS, uintptr(unsafe.Pointer(&blocks)))
	if errno != 0 {
		return fmt.Errorf("the file system cannot be grown from %d to %d MiB: %w",
			super.blocks*super.blockSize>>20, size>>20, errno)
	}
	return nil
}

// release makes the disk clean. Mount namespaces that are about to end may still have it mounted.
// So it is made read-only first, which applies to all of them.
func (m *mounted) release() error {
	unix.Sync()
	var err error
	if !m.readOnly {
		for range 200 { // files of processes that were killed are closed soon
			err = unix.Mount("", m.dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
			if !errors.Is(err, unix.EBUSY) {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	if err != nil {
		err = fmt.Errorf("disk %s cannot be made clean, its journal has what is missing: %w",
			m.device, err)
	}
	_ = unix.Unmount(m.dir, unix.MNT_DETACH) // it is clean, or cannot be made clean
	return err
}
