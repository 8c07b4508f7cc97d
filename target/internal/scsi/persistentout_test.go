package scsi

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestPersistOutLists refuses parameter lists, each with a pointer to the wrong field.
func TestPersistOutLists(t *testing.T) {
	for _, c := range []struct {
		name    string
		action  byte
		more    []byte
		want    string
		pointer string
	}{
		{"a reserved bit", saRegister, []byte{0x10}, "5/26/00", "8c0014"},
		{"another reserved bit", saRegister, []byte{0x02}, "5/26/00", "890014"},
		{"SPEC_I_PT", saRegister, []byte{0x08}, "5/26/00", "8b0014"},
		{"APTPL without a place for it", saRegister, []byte{bitAPTPL}, "5/26/00", "880014"},
		{"too long", saRegister, []byte{0, 1}, "5/1a/00", ""},
		{"too long, of another service action", saReserve, []byte{0, 1}, "5/1a/00", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			request, list := persistOut(c.action, typeWriteExclusive, 0, 1, c.more...)
			r := b.run(request, list)
			require.Equal(t, c.want, r.outcome())
			if c.pointer != "" {
				requireHex(t, c.pointer, r.sense[15:18])
			}
			require.Equal(t, "0:", b.keys())
		})
	}
	b := newBench(t)
	request, list := persistOut(saRegister, 0, 0, 1)
	list[21] = 1
	require.Equal(t, "5/26/00", b.run(request, list).outcome(), "a reserved byte")
	list[21], list[16], list[22] = 0, 1, 1
	require.Equal(t, "GOOD", b.run(request, list).outcome(), "obsolete fields are not looked at")
}

func TestPersistOutCommands(t *testing.T) {
	b := newBench(t)
	b.register(b.nexus, 1)
	for _, c := range []struct{ name, cdb, want string }{
		{"no list", "5f 00 00 00 00 00000000 00", "5/1a/00"},
		{"a list that is too short", "5f 00 00 00 00 00000017 00", "5/1a/00"},
		{"a list that is too long", "5f 00 00 00 00 00010001 00", "5/1a/00"},
		{"a list of 4 GiB", "5f 00 00 00 00 ffffffff 00", "5/1a/00"},
		{"TransportIDs", "5f 00 01 00 00 00000050 00", "5/1a/00"},
		{"another scope", "5f 01 11 00 00 00000018 00", "5/24/00"},
		{"type zero", "5f 01 00 00 00 00000018 00", "5/24/00"},
		{"an obsolete type", "5f 01 02 00 00 00000018 00", "5/24/00"},
		{"a reserved type", "5f 01 0f 00 00 00000018 00", "5/24/00"},
		{"a reserved byte", "5f 01 01 01 00 00000018 00", "5/24/00"},
		{"a service action that is not supported", "5f 08 01 00 00 00000018 00", "5/24/00"},
		{"REGISTER AND MOVE", "5f 07 01 00 00 00000018 00", "5/24/00"},
	} {
		_, list := persistOut(saReserve, 1, 1, 0)
		require.Equal(t, c.want, b.run(cdb(c.cdb), list).outcome(), c.name)
	}
	request, list := persistOut(saReserve, 1, 1, 0)
	require.Equal(t, "5/0e/03", b.run(request, list[:20]).outcome(),
		"the initiator means to send less")
	require.Equal(t, "none", b.reservation())
}

// TestPersistConcurrently lets nexuses register, reserve and preempt each other, while others come
// and go. Whatever the order, the standard allows the state, and what each nexus is told that it
// needs.
func TestPersistConcurrently(t *testing.T) {
	m := &memStore{}
	b := newBench(t, func(l *LUN) { l.Store = m })
	u := b.d.nth(0)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			n := b.d.Attach(InitiatorPort{Name: fmt.Sprintf("iqn.%d", i)})
			own := uint64(i + 1)
			for round := range 200 {
				kind := allTypes[round%len(allTypes)]
				pending(n)
				b.persist(n, saRegisterIgnore, 0, 0, own, bitAPTPL)
				b.persist(n, saReserve, kind, own, 0)
				b.runAs(n, lun1, cdb(writeOne), pattern(1, 1))
				b.persist(n, saPreemptAndAbort, kind, own, own%8+1)
				b.runAs(n, lun1, cdb(reserve), nil)
				b.runAs(n, lun1, cdb(release), nil)
				b.persist(n, saRelease, kind, own, 0)
				if round%10 == 0 {
					b.d.Detach(n)
					n = b.d.Attach(n.port)
				}
				s := u.persistent.state.Load()
				assert.Equal(t, s.kind != typeNone && !s.kind.shared(), s.find(s.holder) != nil)
				assert.True(t, s.kind == typeNone || len(s.registrations) > 0)
			}
		})
	}
	wg.Wait()
	require.Nil(t, u.reserved.Load())
	s := u.persistent.state.Load()
	for n := range b.d.nexuses {
		require.Equal(t, s.bars(n.port), flags(n.nth(0).barred.Load()), n.port.Name)
	}
	stored := testtool.Must(decodePersistent(m.content))(t)
	require.Equal(t, s.encode(), stored.encode())
}

// portOf reads a TransportID, and returns how many bytes it has.
func portOf(t *testing.T, id []byte) (p InitiatorPort, n int) {
	t.Helper()
	n = 4 + int(binary.BigEndian.Uint16(id[2:]))
	require.Equal(t, []byte{0x45, 0}, id[:2])
	require.Zero(t, n%4)
	require.GreaterOrEqual(t, n, 24)
	text, padding, ended := strings.Cut(string(id[4:n]), "\x00")
	require.True(t, ended)
	require.Empty(t, strings.Trim(padding, "\x00"))
	at := strings.LastIndex(text, ",i,0x")
	isid := testtool.Must(hex.DecodeString(text[at+5:]))(t)
	return InitiatorPort{Name: text[:at], ISID: [6]byte(isid)}, n
}

func TestTransportIDs(t *testing.T) {
	for _, p := range []InitiatorPort{
		{Name: "a"},
		{Name: "iqn.1994-05.com.example:initiator", ISID: [6]byte{0, 2, 0x3d, 0xff, 0xab, 0xcd}},
		{Name: "iqn.x,i,0x0123456789ab"},
		{Name: strings.Repeat("é", 111)},
	} {
		b := appendTransportID(nil, p)
		port, n := portOf(t, append(b, 0xff))
		require.Equal(t, len(b), n)
		require.Equal(t, p, port)
	}
}

// FuzzPersistOut sends arbitrary parameter lists to every service action. The target never fails by
// itself, a command that fails changes nothing, and the reported state can be read back.
func FuzzPersistOut(f *testing.F) {
	for action := byte(0); action <= saRegisterIgnore; action++ {
		for _, more := range [][]byte{nil, {bitAPTPL}} {
			_, list := persistOut(action, 1, 1, 2, more...)
			f.Add(action, byte(1), list)
			_, list = persistOut(action, 1, 0, 2, more...)
			f.Add(action, byte(7), list)
		}
	}
	f.Fuzz(func(t *testing.T, action, kind byte, list []byte) {
		m := &memStore{}
		b := newBench(t, func(l *LUN) { l.Store = m })
		second := b.attach("iqn.b", 0)
		b.register(b.nexus, 1)
		b.mustPersist(b.nexus, saReserve, typeWriteExclusive, 1, 0)
		b.register(second, 2)
		before := b.persistIn(b.nexus, saReadFullStatus)

		request := []byte{opPersistOut, action & actionMask, kind, 0, 0, 0, 0, 0, 0, 0}
		binary.BigEndian.PutUint32(request[5:], uint32(len(list)))
		for _, n := range []*Nexus{b.nexus, b.attach("iqn.d", 0)} {
			r := b.runAs(n, lun1, request, list)
			require.NotEqual(t, "4/44/00", r.outcome())
			after := b.persistIn(b.nexus, saReadFullStatus)
			if r.outcome() != "GOOD" {
				require.Equal(t, before, after)
			}
			before = after
			for rest := after[8:]; len(rest) > 0; {
				length := int(binary.BigEndian.Uint32(rest[20:]))
				port, size := portOf(t, rest[24:24+length])
				require.Equal(t, length, size)
				require.NotNil(t, b.d.nth(0).persistent.state.Load().find(port))
				rest = rest[24+length:]
			}
		}
		require.NoError(t, testtool.Err(decodePersistent(m.content)))
	})
}

const (
	readKeys         = "5e 00 00 00 00 00 00 ff ff 00"
	readReservation  = "5e 01 00 00 00 00 00 ff ff 00"
	readCapabilities = "5e 02 00 00 00 00 00 ff ff 00"
	readFullStatus   = "5e 03 00 00 00 00 00 ff ff 00"
)

func TestPersistentReserveIn(t *testing.T) {
	b := newBench(t)
	second := b.attach("iqn.second:with-a-longer-name", 0x23)
	requireHex(t, "00000000 00000000", b.good(cdb(readKeys), nil))
	requireHex(t, "00000000 00000000", b.good(cdb(readReservation), nil))
	requireHex(t, "00000000 00000000", b.good(cdb(readFullStatus), nil))

	b.mustPersist(b.nexus, saRegister, 0, 0, 0x1122334455667788)
	b.mustPersist(second, saRegister, 0, 0, 0xa, bitAllTgPt)
	requireHex(t, "00000002 00000010 1122334455667788 000000000000000a", b.good(cdb(readKeys), nil))
	requireHex(t, "00000002 00000010 11223344", b.good(cdb("5e 00 00 00 00 00 00 00 0c 00"), nil))
	requireHex(t, "", b.good(cdb("5e 00 00 00 00 00 00 00 00 00"), nil))
	requireHex(t, "00000002 00000000", b.good(cdb(readReservation), nil))

	// The TransportIDs: "iqn.a,i,0x000000000000" and its zero byte are 23 bytes, "iqn.second:..."
	// 46.
	first := "1122334455667788 00000000 %s 00000000 0001 0000001c" +
		"45 00 0018 69716e2e61 2c692c3078 303030303030303030303030 0000"
	other := "000000000000000a 00000000 %s 00000000 0001 00000034" +
		"45 00 0030 69716e2e7365636f6e643a776974682d612d6c6f6e6765722d6e616d65 2c692c3078 " +
		"323330303030303030303030 0000"
	both := func(a, b string) string {
		return "00000002 00000080" + replace(first, a) + replace(other, b)
	}
	requireHex(t, both("0000", "0200"), b.good(cdb(readFullStatus), nil))
	b.mustPersist(b.nexus, saReserve, typeWriteExclusiveRO, 0x1122334455667788, 0)
	requireHex(t, "00000002 00000010 1122334455667788 00000000 00 05 0000",
		b.good(cdb(readReservation), nil))
	requireHex(t, both("0105", "0200"), b.good(cdb(readFullStatus), nil))
	b.mustPersist(b.nexus, saPreempt, typeExclusiveAccessShared, 0x1122334455667788,
		0x1122334455667788)
	requireHex(t, "00000003 00000010 0000000000000000 00000000 00 08 0000",
		b.good(cdb(readReservation), nil))
	requireHex(t, "00000003 00000080"+replace(first, "0108")+replace(other, "0308"),
		b.good(cdb(readFullStatus), nil))

	require.Equal(t, "5/24/00", b.run(cdb("5e 04 00 00 00 00 00 00 08 00"), nil).outcome())
	require.Equal(t, "5/24/00", b.run(cdb("5e 00 01 00 00 00 00 00 08 00"), nil).outcome())
}

func TestReportCapabilities(t *testing.T) {
	b := newBench(t)
	requireHex(t, "0008 14 90 ea01 0000", b.good(cdb(readCapabilities), nil))
	requireHex(t, "0008 14", b.good(cdb("5e 02 00 00 00 00 00 00 03 00"), nil))
	b = newBench(t, func(l *LUN) { l.Store = &memStore{} })
	requireHex(t, "0008 15 90 ea01 0000", b.good(cdb(readCapabilities), nil))
	b.mustPersist(b.nexus, saRegister, 0, 0, 1, bitAPTPL)
	requireHex(t, "0008 15 91 ea01 0000", b.good(cdb(readCapabilities), nil))
	b.mustPersist(b.nexus, saRegister, 0, 1, 1)
	// the last APTPL counts
	requireHex(t, "0008 15 90 ea01 0000", b.good(cdb(readCapabilities), nil))
}

// TestPersistentCommandsAreReported asks REPORT SUPPORTED OPERATION CODES for each service action.
func TestPersistentCommandsAreReported(t *testing.T) {
	b := newBench(t)
	for action := range byte(32) {
		in := b.good([]byte{opMaintenanceIn, saReportOpcodes, reportAction, opPersistIn, 0, action,
			0, 0, 1, 0, 0, 0}, nil)
		out := b.good([]byte{opMaintenanceIn, saReportOpcodes, reportAction, opPersistOut, 0,
			action, 0, 0, 1, 0, 0, 0}, nil)
		wantIn, wantOut := []byte{0, supportNone, 0, 0}, []byte{0, supportNone, 0, 0}
		if action <= saReadFullStatus {
			wantIn = []byte{0, supportStandard, 0, 10, opPersistIn, action, 0, 0, 0, 0, 0, 0xff,
				0xff, 0}
		}
		if action <= saRegisterIgnore {
			wantOut = []byte{0, supportStandard, 0, 10, opPersistOut, action, 0xff, 0, 0, 0xff,
				0xff, 0xff, 0xff, 0}
		}
		require.Equal(t, wantIn, in, "PERSISTENT RESERVE IN %02x", action)
		require.Equal(t, wantOut, out, "PERSISTENT RESERVE OUT %02x", action)
	}
	request, list := persistOut(0x07, 0, 1, 2)
	require.Equal(t, "5/24/00", b.run(request, list).outcome(), "REGISTER AND MOVE")
}
