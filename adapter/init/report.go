package guestinit

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/adapter/machine"
)

// reporter reports to people on the console, and to the host on the virtio-serial port.
type reporter struct {
	console io.Writer

	mu   sync.Mutex
	port int // -1: none yet
}

func newReporter(console io.Writer) *reporter { return &reporter{console: console, port: -1} }

// say prints a line on the console.
func (r *reporter) say(format string, args ...any) {
	fmt.Fprintf(r.console, "kubevirt-disk: "+format+"\n", args...)
}

// portTimeout is how long a line may wait for the host to read it. The end of the machine waits for
// it.
const portTimeout = 2 * time.Second

// send sends a line to the host. The line is lost if the host has no port, or does not read it.
func (r *reporter) send(timeout time.Duration, words ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.openLocked() {
		return
	}
	line := []byte(strings.ReplaceAll(strings.Join(words, " "), "\n", " ") + "\n")
	for end := time.Now().Add(timeout); len(line) > 0; {
		n, err := unix.Write(r.port, line)
		if n > 0 {
			line = line[n:]
		}
		if err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) ||
			len(line) > 0 && time.Now().After(end) {
			return
		}
		if n <= 0 {
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// openLocked opens the port if it exists.
func (r *reporter) openLocked() bool {
	if r.port >= 0 {
		return true
	}
	names, _ := filepath.Glob("/sys/class/virtio-ports/*/name") // the pattern is valid
	for _, file := range names {
		if name, err := os.ReadFile(file); err != nil ||
			strings.TrimSpace(string(name)) != machine.Port {
			continue
		}
		device := "/dev/" + filepath.Base(filepath.Dir(file))
		fd, err := unix.Open(device, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err == nil {
			r.port = fd
			return true
		}
	}
	return false
}

// portInterval is the time between two reads of the port while no host is connected: such a read
// returns end of file at once.
const portInterval = time.Second

// longestWord bounds a line of the host, in bytes.
const longestWord = 256

// listen calls stop for each line with which the host asks the machine to stop. It does not return.
func (r *reporter) listen(stop func()) {
	var line []byte
	for {
		line = append(line, r.receive()...)
		for {
			word, rest, whole := bytes.Cut(line, []byte("\n"))
			if !whole {
				break
			}
			if strings.TrimSpace(string(word)) == machine.WordStop {
				stop()
			}
			line = rest
		}
		if len(line) > longestWord {
			line = nil
		}
	}
}

// receive waits until the host has written something, or portInterval if no host is connected.
func (r *reporter) receive() []byte {
	r.mu.Lock()
	there := r.openLocked()
	port := r.port
	r.mu.Unlock()
	if there {
		watch := []unix.PollFd{{Fd: int32(port), Events: unix.POLLIN}}
		if _, err := unix.Poll(watch, -1); err == nil && watch[0].Revents&unix.POLLHUP == 0 {
			b := make([]byte, 64)
			n, _ := unix.Read(port, b) // the next read returns an error, too
			return b[:max(n, 0)]
		}
	}
	time.Sleep(portInterval)
	return nil
}
