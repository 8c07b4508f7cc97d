package target_test

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

// reserved is the status of a command that conflicts with a reservation.
const reserved = "status 0x18"

// register registers a key for the session, whatever key it had.
func register(t *testing.T, sess *Session, key uint64, bits uint8) {
	t.Helper()
	sess.MustGood(t, PersistOut(1,
		Persist{Action: PersistRegisterIgnore, ActionKey: key, Bits: bits}))
}

// keysOf returns the registered keys of LUN 1.
func keysOf(t *testing.T, sess *Session) (keys []uint64) {
	t.Helper()
	p := sess.MustGood(t, PersistIn(1, ReadKeys, 4096)).Data
	require.EqualValues(t, len(p)-8, binary.BigEndian.Uint32(p[4:]))
	for p = p[8:]; len(p) > 0; p = p[8:] {
		keys = append(keys, binary.BigEndian.Uint64(p))
	}
	return keys
}

// reservationOf returns the reservation of LUN 1 as "key/type", or "none".
func reservationOf(t *testing.T, sess *Session) string {
	t.Helper()
	p := sess.MustGood(t, PersistIn(1, ReadReservation, 4096)).Data
	if len(p) == 8 {
		return "none"
	}
	require.Len(t, p, 24)
	return fmt.Sprintf("%x/%d", binary.BigEndian.Uint64(p[8:]), p[21])
}

func TestPersistentReservationsAndSessions(t *testing.T) {
	s, whole := start(t), t
	sess, second := s.login(t, LoginOptions{}), s.login(t, other)
	register(t, sess, 1, 0)
	sess.MustGood(t, PersistOut(1, Persist{Action: PersistReserve, Type: WriteExclusive, Key: 1}))
	t.Run("SPC-4 5.13.1/reservations outlive a session", func(t *testing.T) {
		_, err := sess.Logout(pdu.LogoutCloseSession)
		require.NoError(t, err)
		require.NoError(t, sess.ExpectClosed())
		second.MustFail(t, Write10(1, 0, pattern(BlockSize, 1)), reserved)
		sess = s.login(whole, LoginOptions{})
		sess.MustGood(t, Write10(1, 0, pattern(BlockSize, 1)))
	})
	t.Run("SPC-4 5.13.1/and resets", func(t *testing.T) {
		for _, function := range []pdu.TMFunction{pdu.TMLogicalUnitReset, pdu.TMTargetWarmReset} {
			manage(t, second, pdu.TMComplete,
				pdu.TaskManagementRequest{Function: function, LUN: LUN(1)})
			attentions(t, second, 1)
			attentions(t, sess, 1)
			second.MustFail(t, Write10(1, 0, pattern(BlockSize, 1)), reserved)
			sess.MustGood(t, Write10(1, 0, pattern(BlockSize, 1)))
		}
	})
	t.Run("RFC 7143 3.4.1/another ISID is another nexus", func(t *testing.T) {
		twin := s.login(t, LoginOptions{ISID: [6]byte{0x80, 7}})
		twin.MustFail(t, Write10(1, 0, pattern(BlockSize, 1)), reserved)
		twin.MustFail(t, PersistOut(1,
			Persist{Action: PersistRelease, Type: WriteExclusive, Key: 1}), reserved)
	})
	t.Run("SPC-4 7.6.4.6/READ FULL STATUS names the initiator port", func(t *testing.T) {
		p := second.MustGood(t, PersistIn(1, ReadFullStatus, 4096)).Data
		id := append([]byte{0x45, 0, 0, 52},
			append([]byte(DefaultInitiator), ",i,0x800000000000\x00"...)...)
		require.Equal(t, append([]byte{0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, WriteExclusive, 0, 0,
			0, 0, 0, 1, 0, 0, 0, byte(len(id))}, id...), p[8:],
			hex.Dump(p))
	})
	t.Run("SPC-4 5.13.11.4/PREEMPT", func(t *testing.T) {
		register(t, second, 6, AllTgPt)
		sess.MustGood(t, PersistOut(1, Persist{Action: PersistPreempt, Type: WriteExclusive, Key: 1,
			ActionKey: 6}))
		require.Equal(t, []uint64{1}, keysOf(t, sess))
		require.Equal(t, []string{"06/2A/05"}, attentions(t, second, 1))
	})
	t.Run("SPC-4 5.13.11.6/CLEAR", func(t *testing.T) {
		second.MustFail(t, PersistOut(1, Persist{Action: PersistClear}), reserved)
		register(t, second, 2, 0)
		second.MustGood(t, PersistOut(1, Persist{Action: PersistClear, Key: 2}))
		require.Equal(t, []string{"06/2A/03"}, attentions(t, sess, 1))
		require.Empty(t, keysOf(t, sess))
		require.Equal(t, "none", reservationOf(t, sess))
		second.MustGood(t, Write10(1, 0, pattern(BlockSize, 1)))
	})
	t.Run("SPC-2 5.5.1/RESERVE(6) and persistent reservations exclude each other",
		func(t *testing.T) {
			sess.MustGood(t, Reserve6(1))
			for _, one := range []*Session{sess, second} {
				one.MustFail(t, PersistIn(1, ReadKeys, 8), reserved)
				one.MustFail(t, PersistOut(1, Persist{Action: PersistRegister, ActionKey: 1}),
					reserved)
			}
			sess.MustGood(t, Release6(1))
			register(t, second, 2, 0)
			sess.MustFail(t, Reserve6(1), reserved)
			register(t, second, 0, 0)
			sess.MustGood(t, Reserve6(1))
		})
	t.Run("SPC-4 6.16/malformed lists", func(t *testing.T) {
		attentions(t, second, 2) // from the resets
		long := PersistOut(2, Persist{Action: PersistRegister, ActionKey: 1,
			More: make([]byte, 100)})
		second.MustFail(t, long, "05/1A/00")
		second.MustFail(t, PersistOut(2,
			Persist{Action: PersistRegister, ActionKey: 1, Bits: 0x08}), "05/26/00") // SPEC_I_PT
		second.MustFail(t, PersistOut(2,
			Persist{Action: PersistRegister, ActionKey: 1, Bits: APTPL}), "05/26/00")
		short := PersistOut(2, Persist{Action: PersistRegister, ActionKey: 1})
		short.Write = short.Write[:23]
		second.MustFail(t, short, "05/0E/03")
		huge := PersistOut(2, Persist{Action: PersistRegister, ActionKey: 1})
		huge.CDB[5] = 0xff
		second.MustFail(t, huge, "05/1A/00")
		second.MustGood(t, PersistOut(2, Persist{Action: PersistRegister, ActionKey: 1}))
	})
	s.works(t)
}

// TestPersistThroughPowerLoss abandons a server like a killed process, and starts another one with
// the same disk and store.
func TestPersistThroughPowerLoss(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "unit")
	withFile := func(o *options) { o.LUNs[0].Store = disktest.NewStore(dir, true) }
	s := start(t, withFile)
	sess, second := s.login(t, LoginOptions{}), s.login(t, other)
	require.Equal(t, byte(0x01), sess.MustGood(t, PersistIn(1, ReportCapabilities, 8)).Data[2]&0x01,
		"PTPL_C")
	register(t, sess, 1, APTPL)
	register(t, second, 2, APTPL)
	sess.MustGood(t, PersistOut(1,
		Persist{Action: PersistReserve, Type: ExclusiveAccessRO, Key: 1}))
	third := LoginOptions{Initiator: DefaultInitiator + ".third", ISID: [6]byte{0x80, 3}}

	next := start(t, withFile)
	stranger := next.login(t, third)
	stranger.MustFail(t, Read10(1, 0, 1), reserved)
	require.Equal(t, "1/6", reservationOf(t, stranger))
	require.Equal(t, []uint64{1, 2}, keysOf(t, stranger))
	next.login(t, other).MustGood(t, Write10(1, 0, pattern(BlockSize, 1)))
	sess = next.login(t, LoginOptions{})
	sess.MustGood(t, PersistOut(1, Persist{Action: PersistRegister, Key: 1, ActionKey: 1}))

	last := start(t, withFile)
	stranger = last.login(t, third)
	require.Empty(t, keysOf(t, stranger), "the last APTPL bit was zero")
	stranger.MustGood(t, Write10(1, 0, pattern(BlockSize, 1)))

	require.NoError(t, os.WriteFile(filepath.Join(dir, "reservations"),
		[]byte("no longer what it was"), 0o600))
	damaged := serving.New(serving.Config{})
	_, err := target.New(target.Options{Disks: damaged})
	require.NoError(t, err)
	err = damaged.Add(serving.Options{Number: 1, Name: "one.raw", Disk: s.disks[0],
		Identity: identity(1), Store: disktest.NewStore(dir, true)})
	require.ErrorContains(t, err, "LUN 1")
	require.ErrorContains(t, err, "reservations is damaged: its checksum is wrong; remove it")
	_, err = net.Dial(s.addr.Network(), s.addr.String())
	require.NoError(t, err, "the first server was never stopped")
}

// slowStore fails to save, and takes long for that.
type slowStore struct{ entered, release chan struct{} }

func (slowStore) Load(string) ([]byte, error) { return nil, nil }
func (slowStore) Where(name string) string    { return name }

func (s slowStore) Save(string, []byte) error {
	close(s.entered)
	<-s.release
	return nil
}

func TestPersistentReservationsWithSlowStore(t *testing.T) {
	store := slowStore{make(chan struct{}), make(chan struct{})}
	s := start(t, func(o *options) { o.LUNs[0].Store = store })
	sess, second := s.login(t, LoginOptions{}), s.login(t, other)
	task := sess.MustStart(t, PersistOut(1,
		Persist{Action: PersistRegister, ActionKey: 1, Bits: APTPL}))
	<-store.entered
	for _, one := range []*Session{sess, second} {
		_, err := one.Ping(nil)
		require.NoError(t, err)
		one.MustGood(t, Write10(1, 0, pattern(BlockSize, 1)))
	}
	require.Empty(t, keysOf(t, second), "a registration that is not stored is not in force")
	require.False(t, task.Done())
	close(store.release)
	require.True(t, task.MustFinish(t).Good())
	require.Equal(t, []uint64{1}, keysOf(t, second))
	s.works(t)
}
