package integration

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// consoleLines are the lines that a guest prints.
type consoleLines struct {
	conn  net.Conn
	lines chan string
	seen  []string
}

// newConsole collects the lines of a connection to a console.
func newConsole(t *testing.T, conn net.Conn) *consoleLines {
	t.Helper()
	t.Cleanup(func() { conn.Close() })
	c := &consoleLines{conn: conn, lines: make(chan string, 1024)}
	go func() {
		defer close(c.lines)
		for scanner := bufio.NewScanner(conn); scanner.Scan(); {
			c.lines <- strings.TrimRight(scanner.Text(), "\r")
		}
	}()
	return c
}

// answer types a line.
func (c *consoleLines) answer(t *testing.T) {
	t.Helper()
	_, err := c.conn.Write([]byte("go on\n"))
	require.NoError(t, err)
}

// until waits for a line that begins with prefix and returns the rest of it.
func (c *consoleLines) until(t *testing.T, prefix string) string {
	t.Helper()
	timeout := time.After(guestCommand)
	for {
		select {
		case line, more := <-c.lines:
			if !more {
				require.Fail(t, "the guest has ended", "it never printed %q, but:\n%s", prefix,
					strings.Join(c.seen, "\n"))
			}
			c.seen = append(c.seen, line)
			if rest, ok := strings.CutPrefix(line, prefix); ok {
				return rest
			}
		case <-timeout:
			require.Fail(t, "the guest hangs", "it has not printed %q, but:\n%s", prefix,
				strings.Join(c.seen, "\n"))
		}
	}
}

// machineTime limits everything that a machine does. It is several times what it needs on a busy
// host.
const machineTime = 5 * time.Minute

// blocksSaid returns the numbers of the blocks that the guest has printed after a word, "wrote" or
// "refused".
func blocksSaid(console, word string) (list []int) {
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
