package scsi

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// moveList is the parameter list of a REGISTER AND MOVE.
func moveList(key, actionKey uint64, bits byte, to InitiatorPort) []byte {
	list := binary.BigEndian.AppendUint64(nil, key)
	list = binary.BigEndian.AppendUint64(list, actionKey)
	id := appendTransportID(nil, to)
	list = append(list, 0, bits, 0, relativePort, 0, 0, 0, byte(len(id)))
	return append(list, id...)
}

func (b *bench) moveWith(n *Nexus, list []byte) result {
	request := []byte{opPersistOut, saRegisterAndMove, 0, 0, 0, 0, 0, 0, byte(len(list)), 0}
	return b.runAs(n, lun1, request, list)
}

// move runs a REGISTER AND MOVE and returns how it ended.
func (b *bench) move(n *Nexus, key, actionKey uint64, bits byte, to InitiatorPort) string {
	return b.moveWith(n, moveList(key, actionKey, bits, to)).outcome()
}

func TestRegisterAndMove(t *testing.T) {
	for _, kind := range allTypes {
		t.Run(fmt.Sprint(kind), func(t *testing.T) {
			b := newBench(t)
			second, third := b.attach("iqn.b", 0), b.attach("iqn.c", 0)
			require.Equal(t, conflict, b.move(b.nexus, 0, 2, 0, second.port), "not registered")
			b.register(b.nexus, 1)
			require.Equal(t, conflict, b.move(b.nexus, 1, 2, 0, second.port), "nothing is reserved")
			b.register(third, 3)
			b.mustPersist(b.nexus, saReserve, kind, 1, 0)
			if kind.shared() {
				require.Equal(t, conflict, b.move(b.nexus, 1, 2, 0, second.port), "all hold it")
				require.Equal(t, "2: 1 3", b.keys())
				return
			}
			require.Equal(t, conflict, b.move(b.nexus, 7, 2, 0, second.port), "the wrong key")
			require.Equal(t, conflict, b.move(third, 3, 2, 0, second.port), "not the holder")

			require.Equal(t, "GOOD", b.move(b.nexus, 1, 2, 0, second.port))
			require.Equal(t, "3: 1 3 2", b.keys())
			require.Equal(t, fmt.Sprintf("2/%d", kind), b.reservation())
			require.Equal(t, "GOOD", b.runAs(second, lun1, cdb(writeOne), pattern(1, 1)).outcome())
			if !kind.registrants() {
				require.Equal(t, conflict, b.run(cdb(writeOne), pattern(1, 1)).outcome())
			}
			require.Equal(t, conflict, b.move(b.nexus, 1, 2, 0, third.port), "no longer the holder")

			require.Equal(t, "GOOD", b.move(second, 2, 9, bitUnreg, third.port))
			require.Equal(t, "4: 1 9", b.keys(), "the new holder has a new key, the old one none")
			require.Equal(t, fmt.Sprintf("9/%d", kind), b.reservation())
			for _, n := range []*Nexus{b.nexus, second, third} {
				require.Empty(t, pending(n))
			}
		})
	}
}

func TestRegisterAndMoveLists(t *testing.T) {
	to := InitiatorPort{Name: "iqn.b"}
	set := func(at int, v ...byte) []byte {
		list := moveList(1, 2, 0, to)
		copy(list[at:], v)
		return list
	}
	node := append(moveList(1, 2, 0, to)[:24], unhex(nodeID("iqn.b"))...)
	good := moveList(1, 2, 0, to)
	for _, c := range []struct {
		name, want, pointer string
		list                []byte
	}{
		{"key zero", "5/26/00", "8f0008", moveList(1, 0, 0, to)},
		{"to oneself", "5/26/00", "800018", moveList(1, 2, 0, InitiatorPort{Name: "iqn.a"})},
		{"APTPL without a place for it", "5/26/00", "880011", moveList(1, 2, bitAPTPL, to)},
		{"a reserved byte", "5/26/00", "8f0010", set(16, 1)},
		{"a reserved bit", "5/26/00", "8f0011", set(17, 4)},
		{"another target port", "5/26/00", "8f0012", set(18, 0, 2)},
		{"a node", "5/26/00", "8f0018", node},
		{"another protocol", "5/26/00", "8b0018", set(24, 0x46)},
		{"a length that is less", "5/1a/00", "", set(23, 4)},
		{"a TransportID that is shorter than said", "5/1a/00", "",
			append(set(23, byte(len(good)-24+4)), 0, 0, 0, 0)},
		{"no TransportID", "5/1a/00", "", set(23, 0)[:24]},
		{"a list that is cut off", "5/1a/00", "", good[:30]},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			b.register(b.nexus, 1)
			b.mustPersist(b.nexus, saReserve, typeWriteExclusive, 1, 0)
			r := b.moveWith(b.nexus, c.list)
			require.Equal(t, c.want, r.outcome())
			if c.pointer != "" {
				requireHex(t, c.pointer, r.sense[15:18])
			}
			require.Equal(t, "1: 1", b.keys())
			require.Equal(t, "1/1", b.reservation())
		})
	}
}

func TestMovedReservationSurvives(t *testing.T) {
	m := &memStore{}
	b := restarted(t, m)
	b.register(b.nexus, 1)
	b.mustPersist(b.nexus, saReserve, typeExclusiveAccess, 1, 0)
	require.Equal(t, "GOOD", b.move(b.nexus, 1, 2, bitAPTPL|bitUnreg, InitiatorPort{Name: "iqn.b"}))
	b = restarted(t, m)
	require.Equal(t, "0: 2", b.keys())
	require.Equal(t, "2/3", b.reservation())
	require.Equal(t, conflict, b.run(cdb(readOne), nil).outcome())
	require.Equal(t, "GOOD", b.runAs(b.attach("iqn.b", 0), lun1, cdb(readOne), nil).outcome())
}
