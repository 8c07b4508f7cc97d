package target_test

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

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

// TestReservationsKnowTheInitiatorPort: name and ISID of a login are the port that is registered.
func TestReservationsKnowTheInitiatorPort(t *testing.T) {
	s := start(t)
	sess := s.login(t, LoginOptions{})
	register(t, sess, 1, 0)
	sess.MustGood(t, PersistOut(1, Persist{Action: PersistReserve, Type: WriteExclusive, Key: 1}))
	twin := s.login(t, LoginOptions{ISID: [6]byte{0x80, 7}})
	twin.MustFail(t, Write10(1, 0, pattern(BlockSize, 1)), reserved)
	id := append([]byte{0x45, 0, 0, 52},
		append([]byte(DefaultInitiator), ",i,0x800000000000\x00"...)...)
	require.Equal(t, id, twin.MustGood(t, PersistIn(1, ReadFullStatus, 4096)).Data[32:])
	require.NoError(t, sess.Close())
	sess = s.login(t, LoginOptions{})
	sess.MustGood(t, Write10(1, 0, pattern(BlockSize, 1)))
	s.works(t)
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
