package instance

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/overlay"
	"kubevirt.io/disk/internal/durable"
)

// The versions of the state file. No other is read.
const (
	// stateVersion is for a disk whose content is in its own file, and in its image.
	stateVersion = 2
	// layeredVersion is for a disk with layers above its file. The format is the same. Programs
	// without layers do not know this version: they would go on with the file alone.
	layeredVersion = 3
)

// state says what one start knows about a disk, for the next start. It is a file in the disk's
// directory.
type state struct {
	Version int    `json:"version"`
	Image   string `json:"image"` // file name in the image directory
	// of an ephemeral disk: Options.Owner
	Owner string   `json:"owner,omitempty"`
	Mode  CopyMode `json:"mode"`
	Size  int64    `json:"size"` // of the disk, bytes
	// of a logical block, bytes; 0: disk.SectorSize
	BlockSize int `json:"block_size,omitempty"`
	// virtual, bytes; 0 if the disk came without an image
	ImageSize int64         `json:"image_size"`
	Identity  disk.Identity `json:"identity"`
	Created   time.Time     `json:"created"`
	Durable   bool          `json:"durable"` // a flush reaches storage
	// the file is the whole disk, and there is no map
	Complete bool `json:"complete"`
	// The file was made. If Made is false and the file is missing, it may never have been there,
	// because the state is made first. States of earlier versions lack Made.
	Made bool `json:"made,omitempty"`
	// identifier of the map files, 32 hexadecimal digits
	Map  string `json:"map"`
	Boot string `json:"boot"` // the running kernel's boot; see survivesBoot
	// LUN is the number that the disk was served as last; 0: unknown
	LUN uint16 `json:"lun,omitempty"`
	// of the image; empty if it is served in place
	Chain []image.Fingerprint `json:"chain"`
	// the file served in place, see image.FileInstance; "" if unknown
	File string `json:"file"`

	stale bool // the state file lacks a part of this state
	// the layers above the disk's file; nil: there are none. They are in a file of their own
	layers *overlay.Record
}

// newIdentity draws a random identity, so that no two disks in the world share one.
func newIdentity() disk.Identity {
	var random [18]byte
	rand.Read(random[:]) // never fails
	return disk.IdentityOf(random)
}

// saveState replaces the state of the directory's disk in one step. With synced, the state is on
// storage when saveState returns.
func (d *diskDir) saveState(s *state, synced bool) error {
	d.stateMu.Lock()
	defer d.stateMu.Unlock()
	return d.saveLocked(s, synced)
}

func (d *diskDir) saveLocked(s *state, synced bool) error {
	if err := d.checkPath(); err != nil {
		return err
	}
	s.Version = stateVersion
	if d.layered {
		s.Version = layeredVersion
	}
	return durable.SaveRecord(d.state(), s, d.checkPath, syncIf(synced))
}

// mark stores in the state file whether the disk has layers. Another goroutine uses the state in
// memory, so mark reads the file and changes that.
func (d *diskDir) mark(layered, synced bool) error {
	d.stateMu.Lock()
	defer d.stateMu.Unlock()
	s, err := loadState(d.state())
	if err != nil {
		return err
	}
	before := d.layered
	d.layered = layered
	if err = d.saveLocked(s, synced); err != nil && layered {
		d.layered = before
	}
	return err
}

func syncIf(synced bool) func(*os.File) error {
	if synced {
		return (*os.File).Sync
	}
	return nil
}

// loadState reads a state file. It returns fs.ErrNotExist if there is none, and a
// *durable.DamagedError if it is damaged. After any other error it may be intact, and its disk must
// not be discarded.
func loadState(path string) (*state, error) {
	s := new(state)
	err := durable.LoadRecord(path, s, stateVersion, layeredVersion)
	if err == nil {
		err = s.check()
	}
	if err != nil {
		return nil, fmt.Errorf("its state file %w", err)
	}
	return s, nil
}

// check says whether a state contradicts itself.
func (s *state) check() error {
	if s.BlockSize != 0 && s.BlockSize != disk.LongBlock || s.Size <= 0 ||
		s.Size%int64(s.blockSize()) != 0 || s.ImageSize < 0 || s.ImageSize > s.Size ||
		len(s.mapID()) != 16 || s.Identity.Serial == "" || len(s.Identity.Serial) > 36 ||
		s.Identity.NAA[0]>>4 != 3 {
		return durable.Damaged("it contradicts itself")
	}
	if !s.Complete && s.Mode != CopyNone && (s.ImageSize == 0 || len(s.Chain) == 0) {
		return durable.Damaged("the disk needs an image, and it names none")
	}
	return nil
}

// mapID returns the identifier of the map files in bytes, or nil if it is damaged.
func (s *state) mapID() []byte {
	id, err := hex.DecodeString(s.Map)
	if err != nil {
		return nil
	}
	return id
}

// newMapID draws an identifier for map files.
func newMapID() string {
	var random [16]byte
	rand.Read(random[:]) // never fails
	return hex.EncodeToString(random[:])
}

// survivesBoot reports whether the disk is intact even if the machine has restarted. If the disk is
// not durable, data that was only in the page cache may be lost.
func (s *state) survivesBoot(boot string) bool {
	return s.Durable || boot != "" && s.Boot == boot
}

var boot atomic.Pointer[string] // nil: nobody has asked yet

// knowBoot finds out which boot of the kernel this is. It asks until there is an answer, and then
// never again. Before that, a disk would seem to be of another boot.
func knowBoot() error {
	if boot.Load() != nil {
		return nil
	}
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("it is unknown whether the machine was restarted: %w", err)
	}
	boot.Store(new(strings.TrimSpace(string(text))))
	return nil
}

// bootID identifies the running kernel's boot. It is "" if the kernel does not tell. knowBoot comes
// first.
func bootID() string {
	if id := boot.Load(); id != nil {
		return *id
	}
	return ""
}

// storedName returns the name of an image as a state file has it. JSON replaces an invalid byte of
// UTF-8 by U+FFFD.
func storedName(image string) string { return string([]rune(image)) }

// stateReason explains an error of loadState in the log.
func stateReason(err error) string {
	if errors.Is(err, fs.ErrNotExist) {
		return "its state file is missing: an earlier start did not finish"
	}
	return err.Error()
}
