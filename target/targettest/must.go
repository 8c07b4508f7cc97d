package targettest

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// MustDial is Dial, and closes the connection when the test ends.
func MustDial(t testing.TB, addr net.Addr) *Conn {
	t.Helper()
	c := testtool.Must(Dial(addr))(t)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// MustLogin is Login, and closes the connection when the test ends. It clears the unit attentions
// of luns.
func MustLogin(t testing.TB, addr net.Addr, o LoginOptions, luns ...uint16) *Session {
	t.Helper()
	s := testtool.Must(MustDial(t, addr).Login(o))(t)
	for _, lun := range luns {
		require.NoError(t, testtool.Err(s.ClearAttention(lun)), "LUN %d", lun)
	}
	return s
}

// MustDo is Do.
func (s *Session) MustDo(t testing.TB, c Command) *Result {
	t.Helper()
	return testtool.Must(s.Do(c))(t, "CDB %x", c.CDB)
}

// MustGood is Do, and fails the test if the command does not end with GOOD.
func (s *Session) MustGood(t testing.TB, c Command) *Result {
	t.Helper()
	r := s.MustDo(t, c)
	require.True(t, r.Good(), "CDB %x: %s", c.CDB, r.Failed())
	return r
}

// MustFail is Do, and fails the test if the command does not end with this sense data
// ("key/asc/ascq") or status ("status 0x18").
func (s *Session) MustFail(t testing.TB, c Command, want string) *Result {
	t.Helper()
	r := s.MustDo(t, c)
	require.Equal(t, want, r.Failed(), "CDB %x", c.CDB)
	return r
}

// MustStart is Start.
func (s *Session) MustStart(t testing.TB, c Command) *Task {
	t.Helper()
	return testtool.Must(s.Start(c))(t, "CDB %x", c.CDB)
}

// MustFinish is Finish.
func (t *Task) MustFinish(tb testing.TB) *Result {
	tb.Helper()
	return testtool.Must(t.Finish())(tb, "CDB %x", t.command.CDB)
}
