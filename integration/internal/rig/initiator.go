package rig

import (
	"bytes"
	bin "encoding/binary"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/target/targettest"
)

// LoginTo logs in with our own initiator, for features that other clients lack.
func LoginTo(t *testing.T, d *Daemon, initiator string) *targettest.Session {
	t.Helper()
	addr, err := net.ResolveTCPAddr("tcp", d.Portals[0])
	require.NoError(t, err)
	s := targettest.MustLogin(t, addr, targettest.LoginOptions{Initiator: initiator})
	s.Timeout = Timeout
	_, err = s.ClearAttention(1)
	require.NoError(t, err)
	return s
}

func ReadBlock(lun uint16, lba uint32) targettest.Command { return targettest.Read10(lun, lba, 1) }

func Do(t *testing.T, s *targettest.Session, c targettest.Command) *targettest.Result {
	t.Helper()
	r, err := s.Do(c)
	require.NoError(t, err)
	return r
}

func Logout(t *testing.T, s *targettest.Session) {
	t.Helper()
	_, err := s.Logout(0)
	require.NoError(t, err)
}

// Block returns a block that contains its own address and the writer's round.
func Block(lba uint32, round byte) []byte {
	b := bytes.Repeat([]byte{round}, 512)
	bin.BigEndian.PutUint32(b, lba)
	return b
}
