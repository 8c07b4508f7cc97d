// Package machine has everything that the host and the init of a machine for a container image
// share: the kernel's parameters, the options next to the image's configuration, and the words on
// the virtio-serial port.
//
// The commands of kubevirt-disk write these, and the init (adapter/init) reads them; so can other
// tools that boot such a machine. The package imports nothing but the standard library and the
// names of signals, because the init is loaded at each boot.
package machine

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The part of the disk with the image's configuration and the Options, in JSON, followed by zeros;
// see adapter.Config. Bytes.
const (
	ConfigOffset = 16544 * 4096
	ConfigSize   = 1 << 20
)

// Options change how the image is run. The zero value runs it by its own configuration.
type Options struct {
	// Entrypoint replaces the image's entry point and its arguments; Args replaces the arguments.
	Entrypoint []string `json:"entrypoint,omitempty"`
	Args       []string `json:"args,omitempty"`
	Env        []string `json:"env,omitempty"` // NAME=VALUE, added to the image's
	User       string   `json:"user,omitempty"`
	WorkDir    string   `json:"workDir,omitempty"`
	StopSignal string   `json:"stopSignal,omitempty"`
	Hostname   string   `json:"hostname,omitempty"`
	// Grace is the time from the stop signal to SIGKILL in seconds; 0: DefaultGrace.
	Grace uint `json:"grace,omitempty"`
	// TTY gives the entry point the console as its terminal.
	TTY bool `json:"tty,omitempty"`
}

// Parameters of the kernel's command line that the init reads.
const (
	ParamSerial   = "kubevirt.serial"   // of the disk; needed if there is more than one
	ParamHostname = "kubevirt.hostname" // has precedence over Options and DHCP
	ParamGrace    = "kubevirt.grace"    // has precedence over Options
	ParamTTY      = "kubevirt.tty"      // 1: as Options.TTY
	ParamNetwork  = "kubevirt.network"  // seconds that the start waits for the network
)

// The defaults of parameters.
const (
	DefaultGrace   = 10 * time.Second // as in container runtimes
	DefaultNetwork = 10 * time.Second
)

// MaxSeconds limits the times above, in seconds: a day. A longer time is a mistake.
const MaxSeconds = 24 * 60 * 60

// DefaultSerial is the serial number of the disk that the commands of kubevirt-disk write.
const DefaultSerial = "container"

// KernelArgs returns the kernel's command line for an architecture, named as in Go, and the serial
// number of a disk.
func KernelArgs(arch, serial string) string {
	console := "ttyS0"
	if arch == "arm64" {
		console = "ttyAMA0"
	} else {
		// On a busy host, an emulated machine fails the kernel's check of its timer, and panics.
		console += " no_timer_check"
	}
	return fmt.Sprintf("console=%s quiet panic=-1 %s=%s", console, ParamSerial, serial)
}

// Port is the name of the virtio-serial port on which the init reports, one line each. A host may
// connect at any time. If it writes the line WordStop, that is like pressing the power button.
const Port = "io.kubevirt.disk.0"

// The first words of lines on the port.
const (
	WordRunning = "running" // the entry point was started
	// WordExited: the entry point has ended, and the disk is clean. The exit status follows, 0 to
	// 255, or 128 plus the number of the signal that ended it.
	WordExited = "exited"
	// WordFailed: the entry point could not be started; the reason follows. The next line is
	// WordExited.
	WordFailed = "failed"
	WordStop   = "stop"
)

// Exit statuses of a machine that could not run its entry point, as in container runtimes.
const (
	StatusMachine  = 125 // no disk, no configuration, and the like
	StatusExec     = 126 // the entry point exists, but cannot be run
	StatusNotFound = 127
)

// IsName reports whether a text consists of the characters in names of machines and domains. Others
// have a meaning in files such as /etc/hosts.
func IsName(text string) bool {
	return text != "" && !strings.ContainsFunc(text, func(c rune) bool {
		letter := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
		return !letter && c != '-' && c != '_' && c != '.'
	})
}

// MaxHostname is the length of the longest name that Linux gives a machine, in bytes.
const MaxHostname = 64

// IsHostname reports whether a machine can have this name.
func IsHostname(name string) bool { return IsName(name) && len(name) <= MaxHostname }

// The real-time signals.
const (
	SignalRTMin = 34 // as in glibc and musl, which use the first ones themselves
	SignalRTMax = 64
)

// ParseSignal reads the stop signal of an image: a number, or a name with or without SIG. "" means
// SIGTERM.
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
