package instance

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/smallfile"
)

// stateVersion is the format of the state file. Another one is not read.
const stateVersion = 2

// state is what is remembered of a disk between two starts, in the disk's work directory.
type state struct {
	Version int    `json:"version"`
	Image   string `json:"image"` // file name in the image directory
	// of an ephemeral disk: OpenOptions.Owner
	Owner string   `json:"owner,omitempty"`
	Mode  CopyMode `json:"mode"`
	Size  int64    `json:"size"` // of the disk, bytes
	// virtual, bytes; 0 where the disk came without an image
	ImageSize int64         `json:"image_size"`
	Identity  disk.Identity `json:"identity"`
	Created   time.Time     `json:"created"`
	Durable   bool          `json:"durable"` // what was flushed reached storage
	// the file is the whole disk, and there is no map
	Complete bool `json:"complete"`
	// identifier of the map files, 32 hexadecimal digits
	Map  string `json:"map"`
	Boot string `json:"boot"` // the running kernel's boot; see survivesBoot
	// of the image; empty where the image is served in place
	Chain []image.Fingerprint `json:"chain"`
	// the one that is served in place, see fileInstance; "" where it is not known
	File string `json:"file"`

	stale bool // the file does not say all of this yet
}

// sealed is a state in the file: the checksum is of the exact bytes of the body.
type sealed struct {
	Checksum string          `json:"xxhash64"`
	Body     json.RawMessage `json:"state"`
}

// newIdentity draws an identity from the system's random numbers, so that no two disks in the world
// share one. Ten random bytes make a serial of 20 characters, as much as virtio-blk shows.
func newIdentity() disk.Identity {
	var random [18]byte
	rand.Read(random[:]) // never fails
	id := disk.Identity{Serial: hex.EncodeToString(random[:10])}
	copy(id.NAA[:], random[10:])
	id.NAA[0] = 0x30 | id.NAA[0]&0x0f // SPC-4 7.8.6.6: NAA 3h, locally assigned
	return id
}

// save writes the state under its final name in one step. With durable it has reached storage then.
func (s *state) save(path string, durable bool) error {
	body, err := json.Marshal(s)
	if err != nil {
		return err
	}
	text, err := json.Marshal(sealed{Checksum: checksum(body), Body: body})
	if err != nil {
		return err
	}
	var sync func(*os.File) error
	if durable {
		sync = (*os.File).Sync
	}
	return smallfile.Replace(path, append(text, '\n'), path+smallfile.SpareSuffix, sync)
}

// damagedError is a state file that is there but says nothing that can be relied on.
type damagedError struct{ reason string }

func (e *damagedError) Error() string { return "its state file " + e.reason }

func damagedState(format string, args ...any) error {
	return &damagedError{fmt.Sprintf(format, args...)}
}

// loadState reads a state file: fs.ErrNotExist without one, *damagedError for one that is not
// intact. After any other error it may be intact, and what it is of must not be given up.
func loadState(path string) (*state, error) {
	text, err := smallfile.Read(path)
	switch {
	case err == nil:
		return decodeState(text)
	case errors.Is(err, fs.ErrNotExist):
		return nil, err
	case smallfile.IsUnread(err):
		return nil, fmt.Errorf("its state file %w", err)
	}
	return nil, damagedState("%v", err)
}

// decodeState checks and decodes the content of a state file. Errors are *damagedError.
func decodeState(text []byte) (*state, error) {
	var outer sealed
	if err := json.Unmarshal(text, &outer); err != nil {
		return nil, damagedState("is damaged: %v", err)
	}
	if sum := checksum(outer.Body); sum != outer.Checksum {
		return nil, damagedState("is damaged: its checksum is wrong")
	}
	var s state
	decoder := json.NewDecoder(bytes.NewReader(outer.Body))
	if err := decoder.Decode(&s); err != nil {
		return nil, damagedState("is damaged: %v", err)
	}
	if s.Version != stateVersion {
		return nil, damagedState("has version %d, and this program knows %d", s.Version,
			stateVersion)
	}
	if s.Size <= 0 || s.Size%disk.SectorSize != 0 || s.ImageSize < 0 || s.ImageSize > s.Size ||
		len(s.mapID()) != 16 || s.Identity.Serial == "" || len(s.Identity.Serial) > 36 ||
		s.Identity.NAA[0]>>4 != 3 {
		return nil, damagedState("is damaged: it contradicts itself")
	}
	if !s.Complete && s.Mode != CopyNone && (s.ImageSize == 0 || len(s.Chain) == 0) {
		return nil, damagedState("is damaged: the disk needs an image, and it names none")
	}
	return &s, nil
}

// mapID is the identifier of the map files, in bytes; empty if it is not intact.
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

func checksum(p []byte) string { return fmt.Sprintf("%016x", xxhash.Sum64(p)) }

// survivesBoot reports whether the disk is intact although the machine may have been restarted
// since: a disk that is not durable lost what only the page cache held.
func (s *state) survivesBoot(boot string) bool {
	return s.Durable || boot != "" && s.Boot == boot
}

// bootID identifies the running kernel's boot; "" where the kernel does not tell. It is asked once,
// with the first disk: later there may be no descriptor left to ask it, and a disk would be taken
// for one of another boot.
var bootID = sync.OnceValue(func() string {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
})

// storedName is the name of an image as a state file has it after it was saved: JSON is text, in
// which a byte that is no UTF-8 becomes U+FFFD.
func storedName(image string) string { return string([]rune(image)) }

// stateReason puts an error of loadState into words for the log.
func stateReason(err error) string {
	if errors.Is(err, fs.ErrNotExist) {
		return "its state file is missing: an earlier start did not finish"
	}
	return err.Error()
}
