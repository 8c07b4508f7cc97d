package server

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// stranger opens a connection and begins a request without a token.
func stranger(t *testing.T, s *running, length int, more string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", s.address)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	_, err = fmt.Fprintf(c, "PUT /volume/vm/data HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"+
		"%s\r\n", length, more)
	require.NoError(t, err)
	return c
}

func readStatus(t *testing.T, c net.Conn) int {
	t.Helper()
	answer, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	defer answer.Body.Close()
	require.NotEmpty(t, answer.Header.Get("WWW-Authenticate"))
	return answer.StatusCode
}

// TestTurnedAway: a client without a token gets its answer even if it sends first and reads then,
// as long as it sends little. The server does not ask it for its data, and does not read much of
// it.
func TestTurnedAway(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("0123456789abcdef"), 0o600))
	s := serve(t, Access{Token: file})
	piece := bytes.Repeat([]byte("x"), refusedBody*3/4)

	c := stranger(t, s, len(piece), "")
	_, err := c.Write(piece)
	require.NoError(t, err)
	require.Equal(t, http.StatusUnauthorized, readStatus(t, c))

	c = stranger(t, s, 1<<30, "Expect: 100-continue\r\n")
	require.Equal(t, http.StatusUnauthorized, readStatus(t, c))

	c = stranger(t, s, 1<<40, "")
	for sent := 0; ; sent += len(piece) {
		require.Less(t, sent, 1<<30, "everything is taken")
		if _, err := c.Write(piece); err != nil {
			return
		}
	}
}
