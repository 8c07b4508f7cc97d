package target_test

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

func TestReservationEndsBeforeLogoutIsAnswered(t *testing.T) {
	s := start(t)
	second := s.login(t, other)
	for range 20 {
		holder := s.login(t, LoginOptions{Initiator: DefaultInitiator + ".holder",
			ISID: [6]byte{0x80, 7}})
		holder.MustGood(t, Command{LUN: 1, CDB: []byte{0x16, 0, 0, 0, 0, 0}})
		second.MustFail(t, Read10(1, 0, 1), "status 0x18")
		_, err := holder.Logout(pdu.LogoutCloseSession)
		require.NoError(t, err)
		second.MustGood(t, Read10(1, 0, 1))
	}
}

// TestClosedConnectionIsSeenAtTheNextLogin checks that an initiator that loses its connection and
// logs in at once with another ISID is not blocked by its own claims.
func TestClosedConnectionIsSeenAtTheNextLogin(t *testing.T) {
	s := start(t)
	for i := range 50 {
		o := LoginOptions{Initiator: DefaultInitiator + ".holder", ISID: [6]byte{0x80, byte(i)}}
		holder := s.login(t, o)
		holder.MustGood(t, Command{LUN: 1, CDB: []byte{0x16, 0, 0, 0, 0, 0}})
		require.NoError(t, holder.Close())
	}
	s.login(t, LoginOptions{Initiator: DefaultInitiator + ".holder",
		ISID: [6]byte{0x80, 99}}).MustGood(t, Read10(1, 0, 1))
}

func TestDiskErrors(t *testing.T) {
	for _, tt := range []struct {
		name    string
		rule    disktest.Rule
		command Command
		want    string
	}{
		{"SBC-3 4.7.3.6/no space", disktest.Rule{Op: disktest.OpWrite, Err: disk.ErrNoSpace},
			Write10(1, 0, pattern(BlockSize, 1)), "07/27/07"},
		{"SBC-3 4.18/read error",
			disktest.Rule{Op: disktest.OpRead, Err: &disk.MediumError{Op: "read", Err: errDisk}},
			Read10(1, 0, 1), "03/11/00"},
		{"SBC-3 4.18/write error",
			disktest.Rule{Op: disktest.OpWrite, Err: &disk.MediumError{Op: "write", Err: errDisk}},
			Write10(1, 0, pattern(BlockSize, 1)), "03/0C/00"},
		{"SBC-3 4.18/flush error", disktest.Rule{Op: disktest.OpFlush, Err: disk.ErrFailed},
			SynchronizeCache10(1), "04/44/00"},
		{"SBC-4 4.29/an atomic write that fails",
			disktest.Rule{Op: disktest.OpWrite, Times: 1, Err: disk.ErrNoSpace, Partial: 4096},
			writeAtomic(1, 0, pattern(16*BlockSize, 2)), "07/27/07"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := start(t, withStore(t))
			sess := s.login(t, LoginOptions{})
			before := pattern(16*BlockSize, 9)
			sess.MustGood(t, Write10(1, 0, before))
			remove := s.disks[0].Inject(tt.rule)
			sess.MustFail(t, tt.command, tt.want)
			remove()
			require.Equal(t, before, sess.MustGood(t, Read10(1, 0, 16)).Data)
			sess.MustGood(t, tt.command)
		})
	}
	t.Run("SPC-4 4.5.2.2/where the medium failed", func(t *testing.T) {
		s := start(t)
		sess := s.login(t, LoginOptions{})
		s.disks[0].Inject(disktest.Rule{Op: disktest.OpRead,
			Err: &disk.MediumError{Op: "read", Off: 12 * BlockSize, Err: errors.New("bad sector")}})
		r := sess.MustFail(t, Read10(1, 8, 8), "03/11/00")
		require.EqualValues(t, 12, binary.BigEndian.Uint32(r.Sense.Raw[3:]), "INFORMATION")
	})
}

// TestGrownDisk serves a disk that has grown since the last start.
func TestGrownDisk(t *testing.T) {
	s := start(t, func(o *options) { o.LUNs[0].Grown = true })
	sess := MustLogin(t, s.addr, LoginOptions{})
	t.Run("SBC-3 4.7.2/its new capacity is reported", func(t *testing.T) {
		require.Equal(t, []string{"06/29/00", "06/2A/09"}, attentions(t, sess, 1))
	})
	t.Run("SBC-3 4.7.2/not that of another LUN", func(t *testing.T) {
		require.Equal(t, []string{"06/29/00"}, attentions(t, sess, 2))
	})
	t.Run("SBC-3 4.7.2/once to each initiator port", func(t *testing.T) {
		require.NoError(t, sess.Close())
		require.Equal(t, []string{"06/29/07"},
			attentions(t, MustLogin(t, s.addr, LoginOptions{}), 1))
		require.Equal(t, []string{"06/29/00", "06/2A/09"},
			attentions(t, MustLogin(t, s.addr, other), 1))
	})
}
