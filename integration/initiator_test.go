package integration

import (
	"bytes"
	bin "encoding/binary"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/target/targettest"
)

// loginTo logs in with our own initiator, for features that other clients lack.
func loginTo(t *testing.T, d *daemon, initiator string) *targettest.Session {
	t.Helper()
	addr, err := net.ResolveTCPAddr("tcp", d.Portals[0])
	require.NoError(t, err)
	s := targettest.MustLogin(t, addr, targettest.LoginOptions{Initiator: initiator})
	s.Timeout = clientTimeout
	_, err = s.ClearAttention(1)
	require.NoError(t, err)
	return s
}

func readBlock(lun uint16, lba uint32) targettest.Command { return targettest.Read10(lun, lba, 1) }

func do(t *testing.T, s *targettest.Session, c targettest.Command) *targettest.Result {
	t.Helper()
	r, err := s.Do(c)
	require.NoError(t, err)
	return r
}

func logout(t *testing.T, s *targettest.Session) {
	t.Helper()
	_, err := s.Logout(0)
	require.NoError(t, err)
}

// block returns a block that contains its own address and the writer's round.
func block(lba uint32, round byte) []byte {
	b := bytes.Repeat([]byte{round}, 512)
	bin.BigEndian.PutUint32(b, lba)
	return b
}
