// Package machine is what the host and the init of a machine that runs a container image have to
// agree on: the parameters of the kernel, the options beside the image's configuration, and the
// words on the virtio-serial port.
//
// The commands of kubevirt-disk write it, the init (adapter/init) reads it, and so may whoever
// boots such a machine with tools of his own. It imports nothing but the standard library and the
// names of signals, because the init is loaded at each boot.
package machine

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Where the disk has the image's configuration and the Options, in JSON, followed by zeros; see
// adapter.Config. Bytes.
const (
	ConfigOffset = 16544 * 4096
	ConfigSize   = 1 << 20
)

// Options change how the image is run. The zero value runs it as it says itself.
type Options struct {
	// Entrypoint replaces the image's, and its arguments; Args replaces the arguments.
	Entrypoint []string `json:"entrypoint,omitempty"`
	Args       []string `json:"args,omitempty"`
	Env        []string `json:"env,omitempty"` // NAME=VALUE, added to the image's
	User       string   `json:"user,omitempty"`
	WorkDir    string   `json:"workDir,omitempty"`
	StopSignal string   `json:"stopSignal,omitempty"`
	Hostname   string   `json:"hostname,omitempty"`
	// TTY gives the entry point the console as its terminal.
	TTY bool `json:"tty,omitempty"`
}

// Parameters of the kernel's command line that the init reads.
const (
	ParamSerial   = "kubevirt.serial"   // of the disk; without it the machine has only one
	ParamHostname = "kubevirt.hostname" // wins over Options and DHCP
	ParamGrace    = "kubevirt.grace"    // seconds from the stop signal to SIGKILL
	ParamTTY      = "kubevirt.tty"      // 1: as Options.TTY
	ParamNetwork  = "kubevirt.network"  // seconds that the start waits for the network
)

// The defaults of parameters.
const (
	DefaultGrace   = 10 * time.Second // as container runtimes
	DefaultNetwork = 10 * time.Second
)

// DefaultSerial is the serial number of the disk in what the commands of kubevirt-disk write.
const DefaultSerial = "container"

// KernelArgs is the kernel's command line for an architecture, as Go names it, and the serial
// number of a disk.
func KernelArgs(arch, serial string) string {
	console := "ttyS0"
	if arch == "arm64" {
		console = "ttyAMA0"
	} else {
		// On a host that is busy, an emulated machine fails the kernel's check of its timer, and
		// panics.
		console += " no_timer_check"
	}
	return fmt.Sprintf("console=%s quiet panic=-1 %s=%s", console, ParamSerial, serial)
}

// Port is the name of the virtio-serial port on which the init reports, a line each. A host may
// connect at any time. It may write the line WordStop, which is like pressing the power button.
const Port = "io.kubevirt.disk.0"

// What stands on the port at the beginning of a line.
const (
	WordRunning = "running" // the entry point was started
	// WordExited: the entry point has ended, and the disk is clean. The exit status follows, 0 to
	// 255, which is 128 and the signal if one ended it.
	WordExited = "exited"
	// WordFailed: the entry point could not be started; the reason follows. WordExited comes after
	// it.
	WordFailed = "failed"
	WordStop   = "stop"
)

// Exit statuses of a machine that could not run its entry point, as container runtimes have them.
const (
	StatusMachine  = 125 // no disk, no configuration, and the like
	StatusExec     = 126 // it is there and cannot be run
	StatusNotFound = 127
)

// ParseExited reads the line with which the machine says how its entry point has ended.
func ParseExited(line string) (status int, ok bool) {
	word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
	if word != WordExited {
		return 0, false
	}
	status, err := strconv.Atoi(rest)
	return status, err == nil && status >= 0 && status < 256
}
