package guestinit

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// The real-time signals.
const (
	signalRTMin = 34 // as glibc and musl have it: the first ones are theirs
	signalRTMax = 64
	// systemdPowerOff is SIGRTMIN+4 (systemd(1)).
	systemdPowerOff = signalRTMin + 4
)

// parseSignal reads a stop signal as images name it: a number, or a name with or without SIG. ""
// means SIGTERM.
func parseSignal(text string) (syscall.Signal, error) {
	if text == "" {
		return unix.SIGTERM, nil
	}
	if n, err := strconv.Atoi(text); err == nil && n > 0 && n <= signalRTMax {
		return syscall.Signal(n), nil
	}
	name := strings.TrimPrefix(strings.ToUpper(text), "SIG")
	if s := unix.SignalNum("SIG" + name); s != 0 {
		return s, nil
	}
	for _, base := range []struct {
		name   string
		number int
	}{{"RTMIN", signalRTMin}, {"RTMAX", signalRTMax}} {
		rest, ok := strings.CutPrefix(name, base.name)
		if !ok {
			continue
		}
		offset := 0
		if rest != "" {
			var err error
			if offset, err = strconv.Atoi(rest); err != nil {
				break
			}
		}
		if n := base.number + offset; n >= signalRTMin && n <= signalRTMax {
			return syscall.Signal(n), nil
		}
	}
	return 0, fmt.Errorf("the image's stop signal %q is unknown", text)
}
