package machine

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// The real-time signals.
const (
	SignalRTMin = 34 // as in glibc and musl, which use the first ones themselves
	SignalRTMax = 64
)

// ParseSignal reads a stop signal as images name it: a number, or a name with or without SIG. ""
// means SIGTERM.
func ParseSignal(text string) (syscall.Signal, error) {
	if text == "" {
		return unix.SIGTERM, nil
	}
	if n, err := strconv.Atoi(text); err == nil && n > 0 && n <= SignalRTMax {
		return syscall.Signal(n), nil
	}
	name := strings.TrimPrefix(strings.ToUpper(text), "SIG")
	if s := unix.SignalNum("SIG" + name); s != 0 {
		return s, nil
	}
	for _, base := range []struct {
		name   string
		number int
	}{{"RTMIN", SignalRTMin}, {"RTMAX", SignalRTMax}} {
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
		if n := base.number + offset; n >= SignalRTMin && n <= SignalRTMax {
			return syscall.Signal(n), nil
		}
	}
	return 0, fmt.Errorf("the stop signal %q is unknown: write a name such as SIGTERM or "+
		"SIGRTMIN+3, or a number from 1 to %d", text, SignalRTMax)
}
