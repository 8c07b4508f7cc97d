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

const (
	cachingPage = "\x08\x12\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	cacheOff    = "\x08\x12\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	protectPage = "\x0a\x0a\x00\x10\x08\x00\x00\x00\x00\x00\x00\x00"
	controlPage = "\x0a\x0a\x00\x10\x00\x00\x00\x00\x00\x00\x00\x00"
)

// modeSelect sends pages by MODE SELECT(10). bits are the bits of byte 1 other than PF.
func modeSelect(lun uint16, bits byte, pages string) Command {
	list := append(make([]byte, 8), pages...)
	return Command{LUN: lun, CDB: []byte{0x55, 0x10 | bits, 0, 0, 0, 0, 0, 0, byte(len(list)), 0},
		Write: list}
}

// modePage reads a page by MODE SENSE(10), without header and block descriptor.
func modePage(t *testing.T, sess *Session, lun uint16, code byte) string {
	t.Helper()
	return string(sess.MustGood(t, reads(lun, 255, 0x5a, 8, code, 0, 0, 0, 0, 0, 255, 0)).Data[8:])
}

func TestModePages(t *testing.T) {
	s := start(t, withStore(t))
	sess, second := s.login(t, LoginOptions{}), s.login(t, other)
	t.Run("SPC-4 6.14/all pages", func(t *testing.T) {
		require.Equal(t, cachingPage+controlPage+
			"\x1c\x0a\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00", modePage(t, sess, 1, 0x3f))
	})
	t.Run("SPC-4 6.14/unknown page", func(t *testing.T) {
		sess.MustFail(t, reads(1, 255, 0x5a, 8, 0x19, 0, 0, 0, 0, 0, 255, 0), "05/24/00")
		sess.MustFail(t, reads(1, 255, 0x5a, 8, 0x08, 1, 0, 0, 0, 0, 255, 0), "05/24/00")
	})
	t.Run("SBC-3 6.5.2/DPOFUA", func(t *testing.T) {
		require.EqualValues(t, 0x10,
			sess.MustGood(t, reads(1, 255, 0x5a, 8, 0x08, 0, 0, 0, 0, 0, 255, 0)).Data[3])
	})
	t.Run("SPC-4 6.12/a change, and who is told", func(t *testing.T) {
		sess.MustGood(t, modeSelect(1, 0, protectPage))
		require.Equal(t, []string{"06/2A/01"}, attentions(t, second, 1))
		require.Empty(t, attentions(t, sess, 1))
		second.MustFail(t, Write10(1, 0, pattern(BlockSize, 1)), "07/27/02")
		second.MustGood(t, modeSelect(1, 0, controlPage))
		attentions(t, sess, 1)
		sess.MustGood(t, Write10(1, 0, pattern(BlockSize, 1)))
	})
	t.Run("SPC-4 6.12/fields that cannot be changed", func(t *testing.T) {
		sess.MustFail(t, modeSelect(1, 0, "\x08\x12\x05"+cachingPage[3:]), "05/26/00")
		sess.MustFail(t, modeSelect(1, 0, "\x01\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"),
			"05/26/00")
		sess.MustFail(t, modeSelect(1, 0, cachingPage[:10]), "05/1A/00")
	})
	t.Run("SPC-4 6.12/pages cannot be saved", func(t *testing.T) {
		sess.MustFail(t, modeSelect(1, 1, cachingPage), "05/24/00")
		sess.MustFail(t, reads(1, 255, 0x5a, 8, 0xc8, 0, 0, 0, 0, 0, 255, 0), "05/39/00")
	})
}

func TestLogPages(t *testing.T) {
	sess := start(t).login(t, LoginOptions{})
	page := func(code byte) Command {
		return reads(1, 255, 0x4d, 0, 0x40|code, 0, 0, 0, 0, 0, 255, 0)
	}
	used := func() uint32 { return binary.BigEndian.Uint32(sess.MustGood(t, page(0x0c)).Data[20:]) }
	t.Run("SPC-4 7.3.18/supported pages", func(t *testing.T) {
		require.Equal(t, []byte{0, 0, 0, 2, 0, 0x0c}, sess.MustGood(t, page(0)).Data)
	})
	t.Run("SBC-3 6.4.4/used resources follow writes and unmaps", func(t *testing.T) {
		require.Zero(t, used())
		sess.MustGood(t, Write10(1, 0, pattern(2<<20, 1)))
		require.EqualValues(t, 2, used())
		sess.MustGood(t, unmap(1, 0, 4096))
		require.Zero(t, used())
	})
	t.Run("SPC-4 6.9/unknown page", func(t *testing.T) { sess.MustFail(t, page(0x11), "05/24/00") })
	t.Run("SPC-4 6.9/a parameter that does not exist", func(t *testing.T) {
		sess.MustFail(t, reads(1, 255, 0x4d, 0, 0x4c, 0, 0, 1, 0, 0, 255, 0), "05/24/00")
	})
}

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
