package rig

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// ConsoleLines are the lines that a guest prints.
type ConsoleLines struct {
	Conn  net.Conn
	lines chan string
	Seen  []string
}

// NewConsole collects the lines of a connection to a console.
func NewConsole(t *testing.T, conn net.Conn) *ConsoleLines {
	t.Helper()
	t.Cleanup(func() { conn.Close() })
	c := &ConsoleLines{Conn: conn, lines: make(chan string, 1024)}
	go func() {
		defer close(c.lines)
		for scanner := bufio.NewScanner(conn); scanner.Scan(); {
			c.lines <- strings.TrimRight(scanner.Text(), "\r")
		}
	}()
	return c
}

// Answer types a line.
func (c *ConsoleLines) Answer(t *testing.T) {
	t.Helper()
	_, err := c.Conn.Write([]byte("go on\n"))
	require.NoError(t, err)
}

// Until waits for a line that begins with prefix and returns the rest of it.
func (c *ConsoleLines) Until(t *testing.T, prefix string) string {
	t.Helper()
	timeout := time.After(GuestCommand)
	for {
		select {
		case line, more := <-c.lines:
			if !more {
				require.Fail(t, "the guest has ended", "it never printed %q, but:\n%s", prefix,
					strings.Join(c.Seen, "\n"))
			}
			c.Seen = append(c.Seen, line)
			if rest, ok := strings.CutPrefix(line, prefix); ok {
				return rest
			}
		case <-timeout:
			require.Fail(t, "the guest hangs", "it has not printed %q, but:\n%s", prefix,
				strings.Join(c.Seen, "\n"))
		}
	}
}

// MachineTime limits everything that a machine does. It is several times what it needs on a busy
// host.
const MachineTime = 5 * time.Minute

// BlocksSaid returns the numbers of the blocks that the guest has printed after a word, "wrote" or
// "refused".
func BlocksSaid(console, word string) (list []int) {
	for line := range strings.Lines(console) {
		var n int
		// An incomplete line may have only a part of the number.
		if strings.HasSuffix(line, "\n") && strings.HasPrefix(line, word+" ") {
			if _, err := fmt.Sscanf(line, word+" %d", &n); err == nil {
				list = append(list, n)
			}
		}
	}
	return list
}
