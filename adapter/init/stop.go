package guestinit

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The kernel's numbers for keys (linux/input-event-codes.h).
const (
	eventKey     = 1
	keyPower     = 116
	keyPowerDown = 1
	// eventSize is the size of struct input_event: a time of 16 bytes, then type, code and value.
	eventSize = 24
	eventType = 16
)

// powerButtons are the input devices that have a power button. `virsh shutdown`, QEMU's
// system_powerdown and KubeVirt press it to stop a machine. One goroutine uses them at a time.
type powerButtons struct {
	devices string              // pattern of their paths
	isOne   func(*os.File) bool // reports whether a device has such a button
	pressed func()              // is called for each press
	seen    map[string]bool     // the opened devices
}

func newPowerButtons(pressed func()) *powerButtons {
	return &powerButtons{devices: "/dev/input/event*", isOne: hasPowerKey, pressed: pressed,
		seen: map[string]bool{}}
}

// look opens new devices. The kernel reports the events of a device only to processes that have it
// open, so no press is lost from then on.
func (b *powerButtons) look() {
	devices, _ := filepath.Glob(b.devices) // the pattern is valid
	for _, device := range devices {
		if b.seen[device] {
			continue
		}
		f, err := os.Open(device)
		if err != nil {
			continue // it is about to appear
		}
		b.seen[device] = true
		if !b.isOne(f) {
			f.Close()
			continue
		}
		go func() { // one for each, because keyboards have the key, too
			defer f.Close()
			readKeys(f, b.pressed)
		}()
	}
}

// hasPowerKey asks an input device for its keys: EVIOCGBIT(EV_KEY, len), that is _IOC(READ, 'E',
// 0x20 + EV_KEY, len).
func hasPowerKey(f *os.File) bool {
	var keys [96]byte // KEY_CNT bits
	request := uintptr(2<<30 | len(keys)<<16 | 'E'<<8 | (0x20 + eventKey))
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(&keys)))
	return errno == 0 && keys[keyPower/8]&(1<<(keyPower%8)) != 0
}

// readKeys calls pressed for each press of the power key, until the device is gone.
func readKeys(f *os.File, pressed func()) {
	b := make([]byte, 64*eventSize)
	for {
		n, err := f.Read(b)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		for range powerPresses(b[:max(n, 0)]) {
			pressed()
		}
	}
}

// powerPresses counts the presses of the power key in the events of an input device.
func powerPresses(b []byte) (n int) {
	for ; len(b) >= eventSize; b = b[eventSize:] {
		kind := binary.NativeEndian.Uint16(b[eventType:])
		code := binary.NativeEndian.Uint16(b[eventType+2:])
		value := binary.NativeEndian.Uint32(b[eventType+4:])
		if kind == eventKey && code == keyPower && value == keyPowerDown {
			n++
		}
	}
	return n
}
