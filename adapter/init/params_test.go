package guestinit

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/internal/testtool"
)

func TestParseParams(t *testing.T) {
	p, warnings := parseParams(`BOOT_IMAGE=x console=ttyS0 quiet kubevirt.serial="a b" ` +
		"kubevirt.hostname=web kubevirt.tty=1 kubevirt.grace=30 kubevirt.network=0\n")
	require.Empty(t, warnings)
	grace := 30 * time.Second
	require.Equal(t, params{serial: "a b", hostname: "web", tty: true, grace: &grace}, p)

	p, warnings = parseParams("kubevirt.grace=soon kubevirt.network=999999999")
	grace = 10 * time.Second
	require.Equal(t, params{grace: &grace, network: 10 * time.Second}, p)
	require.Equal(t, []string{
		"kubevirt.grace=soon is not a number of seconds up to a day: it counts as 10",
		"kubevirt.network=999999999 is not a number of seconds up to a day: it counts as 10",
	}, warnings)
}

// TestGrace: the kernel's command line wins over the options of the image, which win over 10 s.
func TestGrace(t *testing.T) {
	at, none := 2*time.Second, time.Duration(0)
	for want, c := range map[time.Duration]struct {
		options uint
		param   *time.Duration
	}{10 * time.Second: {}, time.Minute: {options: 60}, at: {60, &at}, 0: {60, &none},
		24 * time.Hour: {options: 1 << 40}} {
		require.Equal(t, want, graceOf(machine.Options{Grace: c.options}, params{grace: c.param}))
	}
}

func TestEnding(t *testing.T) {
	const exited3, killed, hangup, interrupted = 3 << 8, 9, 1, 2
	require.Equal(t, ending{status: 3}, endingOf(unix.WaitStatus(exited3), false))
	require.Equal(t, ending{status: 137}, endingOf(unix.WaitStatus(killed), true))
	require.Equal(t, ending{status: 129}, endingOf(unix.WaitStatus(hangup), false))
	require.Equal(t, ending{restart: true}, endingOf(unix.WaitStatus(hangup), true))
	require.Equal(t, ending{}, endingOf(unix.WaitStatus(interrupted), true))
}

// inputEvent is an event of an input device.
func inputEvent(kind, code uint16, value byte) []byte {
	return append(make([]byte, eventType), byte(kind), 0, byte(code), 0, value, 0, 0, 0)
}

func TestPowerPresses(t *testing.T) {
	b := append(inputEvent(eventKey, keyPower, 1), inputEvent(0, 0, 0)...)
	b = append(b, inputEvent(eventKey, keyPower, 0)...)
	b = append(b, inputEvent(eventKey, 30, 1)...)
	require.Equal(t, 1, powerPresses(b))
	require.Zero(t, powerPresses(b[:eventSize-1]))
}

// TestPowerButtonIsHeardAtOnce: after one look for buttons, each press is noticed without looking
// again.
func TestPowerButtonIsHeardAtOnce(t *testing.T) {
	dir := t.TempDir()
	device := func(name string) *os.File {
		path := filepath.Join(dir, name)
		require.NoError(t, unix.Mkfifo(path, 0o600))
		f, err := os.OpenFile(path, os.O_RDWR, 0) // so that its reader does not wait for a writer
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	pressed := make(chan struct{})
	b := &powerButtons{devices: filepath.Join(dir, "event*"), seen: map[string]bool{},
		isOne:   func(f *os.File) bool { return filepath.Base(f.Name()) != "event0" },
		pressed: func() { pressed <- struct{}{} }}
	b.look() // there is none yet
	keyboard, button := device("event0"), device("event1")
	b.look()
	b.look() // it is not listened to twice
	for _, f := range []*os.File{keyboard, button, button} {
		require.NoError(t, testtool.Err(f.Write(inputEvent(eventKey, keyPower, keyPowerDown))))
	}
	<-pressed
	<-pressed
	require.Len(t, b.seen, 2)
	require.NoError(t, keyboard.SetReadDeadline(time.Now().Add(time.Minute)))
	n := testtool.Must(keyboard.Read(make([]byte, 2*eventSize)))(t)
	require.Equal(t, eventSize, n, "what has no such button is not read")
}
