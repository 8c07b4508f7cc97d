package upload

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// busyClient begins an upload, and sends without looking for an answer.
type busyClient struct {
	net.Conn
	chunked bool
	piece   []byte
}

func (s *server) busy(t *testing.T, volume string, length int64, piece []byte) *busyClient {
	t.Helper()
	c := testtool.Must(net.Dial("tcp", s.Listener.Addr().String()))(t)
	t.Cleanup(func() { _ = c.Close() })
	size := fmt.Sprintf("Content-Length: %d", length)
	if length < 0 {
		size = "Transfer-Encoding: chunked"
	}
	_, err := fmt.Fprintf(c, "PUT /volume/%s/data HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n", volume, size)
	require.NoError(t, err)
	return &busyClient{c, length < 0, piece}
}

// send sends the piece again.
func (c *busyClient) send() error {
	head, tail := "", ""
	if c.chunked {
		head, tail = fmt.Sprintf("%x\r\n", len(c.piece)), "\r\n"
	}
	_, err := c.Write(append(append([]byte(head), c.piece...), tail...))
	return err
}

// TestRefusalReachesABusyClient: a client that sends far more than all buffers hold before it looks
// for an answer still learns why it was refused.
func TestRefusalReachesABusyClient(t *testing.T) {
	s := newServer(t)
	s.handler.timeout = timeout // the machine may be slow
	s.volumes.add(t, "small", 1<<20)
	s.volumes.add(t, "vm", 0)
	s.create(t, "taken", -1)
	raw := rawDisk(1 << 20)
	for name, test := range map[string]struct {
		volume string
		length int64
		piece  []byte
		status int
	}{
		"before a byte was taken": {"small", 1 << 30, raw, http.StatusRequestEntityTooLarge},
		"in the middle":           {"small", -1, raw, http.StatusRequestEntityTooLarge},
		"not its turn":            {"taken", 1 << 30, raw, http.StatusConflict},
		"no disk": {"vm", 1 << 30, append([]byte("QED\x00"), raw...),
			http.StatusUnprocessableEntity},
	} {
		t.Run(name, func(t *testing.T) {
			c := s.busy(t, test.volume, test.length, test.piece)
			for range 48 {
				require.NoError(t, c.send())
			}
			back := testtool.Must(http.ReadResponse(bufio.NewReader(c), nil))(t)
			defer back.Body.Close()
			require.Equal(t, test.status, back.StatusCode)
			require.NotEmpty(t, testtool.Must(io.ReadAll(back.Body))(t))
		})
	}
}

// TestRefusedClientMustStop: the server does not read all of a refused upload.
func TestRefusedClientMustStop(t *testing.T) {
	s := newServer(t)
	s.volumes.add(t, "small", 1<<20)
	const length = 1 << 30
	c := s.busy(t, "small", length, rawDisk(1<<20))
	for range length >> 20 {
		if c.send() != nil {
			return
		}
	}
	t.Fatal("everything was taken")
}
