package targettest

import (
	"net"
	"testing"
)

// MustDial is Dial, and closes the connection when the test ends.
func MustDial(t testing.TB, addr net.Addr) *Conn {
	t.Helper()
	c, err := Dial(addr)
	if err != nil {
		t.Fatalf("connect: %v", err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// MustLogin is Login, and closes the connection when the test ends. It clears the unit attentions
// of luns.
func MustLogin(t testing.TB, addr net.Addr, o LoginOptions, luns ...uint16) *Session {
	t.Helper()
	c := MustDial(t, addr)
	s, err := c.Login(o)
	if err != nil {
		t.Fatalf("login: %v", err)
	}
	for _, lun := range luns {
		if _, err := s.ClearAttention(lun); err != nil {
			t.Fatalf("TEST UNIT READY of LUN %d: %v", lun, err)
		}
	}
	return s
}

// MustDo is Do.
func (s *Session) MustDo(t testing.TB, c Command) *Result {
	t.Helper()
	r, err := s.Do(c)
	if err != nil {
		t.Fatalf("CDB %x: %v", c.CDB, err)
	}
	return r
}

// MustGood is Do, and fails the test if the command does not end with GOOD.
func (s *Session) MustGood(t testing.TB, c Command) *Result {
	t.Helper()
	r := s.MustDo(t, c)
	if !r.Good() {
		t.Fatalf("CDB %x: %s, want GOOD", c.CDB, r.Failed())
	}
	return r
}

// MustFail is Do, and fails the test if the command does not end with this sense data
// ("key/asc/ascq") or status ("status 0x18").
func (s *Session) MustFail(t testing.TB, c Command, want string) *Result {
	t.Helper()
	r := s.MustDo(t, c)
	if got := r.Failed(); got != want {
		t.Fatalf("CDB %x: %s, want %s", c.CDB, got, want)
	}
	return r
}

// MustStart is Start.
func (s *Session) MustStart(t testing.TB, c Command) *Task {
	t.Helper()
	task, err := s.Start(c)
	if err != nil {
		t.Fatalf("CDB %x: %v", c.CDB, err)
	}
	return task
}

// MustFinish is Finish.
func (t *Task) MustFinish(tb testing.TB) *Result {
	tb.Helper()
	r, err := t.Finish()
	if err != nil {
		tb.Fatalf("CDB %x: %v", t.command.CDB, err)
	}
	return r
}
