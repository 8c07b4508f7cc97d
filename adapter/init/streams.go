package guestinit

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// streams are the standard streams of the entry point.
type streams struct {
	in, out *os.File
	copied  chan struct{} // closed when the output is on the console; nil: there is no pipe
}

// newStreams connects the entry point with the console: as its terminal, or, like a container
// without one, with an empty input and a pipe for the output.
func newStreams(tty bool) (*streams, error) {
	if tty {
		f, err := os.OpenFile(consoleDevice(), os.O_RDWR|unix.O_NOCTTY, 0)
		if err != nil {
			return nil, fmt.Errorf("the console cannot become a terminal: %w", err)
		}
		return &streams{in: f, out: f}, nil
	}
	in, err := os.Open(os.DevNull)
	if err != nil {
		return nil, err
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	s := &streams{in: in, out: write, copied: make(chan struct{})}
	go func() {
		defer close(s.copied)
		_, _ = io.Copy(os.Stdout, read) // if the console is gone, its reader is, too
	}()
	return s, nil
}

// started closes our ends, so that the pipe ends when all writers have ended.
func (s *streams) started() {
	s.in.Close()
	s.out.Close()
}

// drainTimeout is how long the last output may take. The console of a machine may have no reader.
const drainTimeout = 10 * time.Second

// finish waits until the output is written.
func (s *streams) finish() {
	if s.copied == nil {
		return
	}
	select {
	case <-s.copied:
	case <-time.After(drainTimeout):
	}
}

// consoleDevice is the terminal behind /dev/console, which itself cannot be a controlling terminal.
func consoleDevice() string {
	text, err := os.ReadFile("/sys/class/tty/console/active")
	names := strings.Fields(string(text))
	if err != nil || len(names) == 0 {
		return "/dev/console"
	}
	return "/dev/" + names[len(names)-1]
}
