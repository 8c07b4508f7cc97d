package scsi

import (
	"encoding/binary"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// specified has the bytes after the basic parameter list with SPEC_I_PT.
func specified(ids ...string) []byte {
	b := []byte{bitSpecIPT, 0, 0, 0, 0}
	for _, id := range ids {
		b = append(b, unhex(id)...)
	}
	binary.BigEndian.PutUint32(b[1:], uint32(len(b)-5))
	return b
}

// portID is the TransportID of iqn.x with an ISID that ends in n.
func portID(name string, n byte) string {
	return fmt.Sprintf("%x", appendTransportID(nil, InitiatorPort{Name: name, ISID: [6]byte{5: n}}))
}

// nodeID is a TransportID without an ISID.
func nodeID(name string) string {
	text := make([]byte, 24)
	copy(text, name)
	return fmt.Sprintf("05000018%x", text)
}

func TestRegisterOthers(t *testing.T) {
	b := newBench(t)
	second, twin := b.attach("iqn.b", 1), b.attach("iqn.b", 2)
	b.d.Detach(twin)
	b.register(second, 2)
	require.Equal(t, "5/26/00", b.persist(second, saRegister, 0, 2, 9, specified()...),
		"somebody who is registered")
	b.mustPersist(b.nexus, saRegister, 0, 0, 7,
		specified(nodeID("iqn.b"), portID("iqn.elsewhere", 4), portID("IQN.Elsewhere", 4),
			portID("iqn.a", 0))...)
	require.Equal(t, "2: 2 7 7 7", b.keys(), "each that is not registered, once")
	b.mustPersist(b.nexus, saReserve, typeExclusiveAccessRO, 7, 0)
	for _, n := range []*Nexus{b.attach("iqn.b", 2), b.attach("iqn.elsewhere", 0)} {
		want := conflict
		if n.port.Name == "iqn.b" {
			want = "GOOD"
		}
		require.Equal(t, want, b.runAs(n, lun1, cdb(readOne), nil).outcome())
	}
	n := b.d.Attach(InitiatorPort{Name: "iqn.elsewhere", ISID: [6]byte{5: 4}})
	pending(n)
	require.Equal(t, "GOOD", b.runAs(n, lun1, cdb(readOne), nil).outcome(),
		"its session comes later")

	var many []string
	for i := range maxRegistrations {
		many = append(many, portID(fmt.Sprintf("iqn.%d", i), 0))
	}
	fresh := newBench(t)
	require.Equal(t, "5/55/04",
		fresh.persist(fresh.nexus, saRegister, 0, 0, 7, specified(many...)...), "one too many")
	require.Equal(t, "0:", fresh.keys(), "and none of them is registered")
	fresh.mustPersist(fresh.nexus, saRegister, 0, 0, 7, specified(many[1:]...)...)
}

// TestPersistOutLists refuses parameter lists, each with a pointer to the wrong field.
func TestPersistOutLists(t *testing.T) {
	valid := "45000018" + "69716e2e61" + "2c692c3078" + "303030303030303030303030" + "0000"
	for _, c := range []struct {
		name    string
		action  byte
		more    []byte
		want    string
		pointer string
	}{
		{"a reserved bit", saRegister, []byte{0x10}, "5/26/00", "8c0014"},
		{"UNREG, which only REGISTER AND MOVE has", saRegister, []byte{0x02}, "5/26/00", "890014"},
		{"SPEC_I_PT of another service action", saReserve, []byte{bitSpecIPT}, "5/26/00", "8b0014"},
		{"SPEC_I_PT while ignoring the key", saRegisterIgnore, []byte{bitSpecIPT}, "5/26/00",
			"8b0014"},
		{"APTPL without a place for it", saRegister, []byte{bitAPTPL}, "5/26/00", "880014"},
		{"too long", saRegister, []byte{0, 1}, "5/1a/00", ""},
		{"too long, of another service action", saReserve, []byte{0, 1}, "5/1a/00", ""},
		{"no length of TransportIDs", saRegister, []byte{bitSpecIPT, 0, 0, 0}, "5/1a/00", ""},
		{"a length that is more", saRegister,
			append([]byte{bitSpecIPT, 0, 0, 0, 32}, unhex(valid)...), "5/1a/00", ""},
		{"a length that is less", saRegister,
			append([]byte{bitSpecIPT, 0, 0, 0, 27}, unhex(valid)...), "5/1a/00", ""},
		{"a TransportID that is cut off", saRegister, specified(valid[:40]), "5/1a/00", ""},
		{"hardly a TransportID", saRegister, specified("4500"), "5/1a/00", ""},
		{"another protocol", saRegister, specified("46" + valid[2:]), "5/26/00", "8b001c"},
		{"another format", saRegister, specified("85" + valid[2:]), "5/26/00", "8f001c"},
		{"reserved bits of the format", saRegister, specified("55" + valid[2:]), "5/26/00",
			"8f001c"},
		{"a reserved byte", saRegister, specified("4501" + valid[4:]), "5/26/00", "8f001d"},
		{"an odd length", saRegister, specified("45000017" + valid[8:54]), "5/26/00", "8f001e"},
		{"too short", saRegister, specified("45000010" + valid[8:40]), "5/26/00", "8f001e"},
		{"no end", saRegister, specified("45000018" + strings.Repeat("61", 24)), "5/26/00",
			"800020"},
		{"something behind the end", saRegister, specified(valid[:54] + "01"), "5/26/00", "800020"},
		{"no ISID", saRegister, specified("45000018" + strings.Repeat("61", 23) + "00"), "5/26/00",
			"800020"},
		{"an ISID of 13 digits", saRegister, specified(valid[:52] + "3000"), "5/26/00", "800020"},
		{"an ISID with other digits", saRegister,
			specified(strings.Replace(valid, "3030", "3067", 1)), "5/26/00", "800020"},
		{"no name", saRegister, specified("45000014" + "2c692c3078" + "303030303030303030303030" +
			"000000"), "5/26/00", "800020"},
		{"a name with a space", saRegister, specified(strings.Replace(valid, "2e61", "2061", 1)),
			"5/26/00", "800020"},
		{"a name of 224 bytes", saRegister,
			specified("050000e4" + strings.Repeat("61", 224) + "00000000"), "5/26/00", "800020"},
		{"the second one", saRegister, specified(valid, "46"+valid[2:]), "5/26/00", "8b0038"},
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
	b.attach("iqn.bystander", 0)
	b.mustPersist(b.attach("iqn.b", 0), saRegister, 0, 0, 1,
		specified(nodeID("iqn.unknown"), "050000e0"+strings.Repeat("61", 223)+"00")...)
	require.Equal(t, "2: 1 1", b.keys(), "no port of these names is known")
}

func TestPersistOutCommands(t *testing.T) {
	b := newBench(t)
	b.register(b.nexus, 1)
	for _, c := range []struct{ name, cdb, want string }{
		{"no list", "5f 00 00 00 00 00000000 00", "5/1a/00"},
		{"a list that is too short", "5f 00 00 00 00 00000017 00", "5/1a/00"},
		{"a list that is too long", "5f 00 00 00 00 00010001 00", "5/1a/00"},
		{"a list of 4 GiB", "5f 00 00 00 00 ffffffff 00", "5/1a/00"},
		{"TransportIDs for RESERVE", "5f 01 01 00 00 00000050 00", "5/1a/00"},
		{"another scope", "5f 01 11 00 00 00000018 00", "5/24/00"},
		{"type zero", "5f 01 00 00 00 00000018 00", "5/24/00"},
		{"an obsolete type", "5f 01 02 00 00 00000018 00", "5/24/00"},
		{"a reserved type", "5f 01 0f 00 00 00000018 00", "5/24/00"},
		{"a reserved byte", "5f 01 01 01 00 00000018 00", "5/24/00"},
		{"a service action that is not supported", "5f 08 01 00 00 00000018 00", "5/24/00"},
		{"REGISTER AND MOVE without a list", "5f 07 01 00 00 00000000 00", "5/1a/00"},
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
	stored, err := decodePersistent(m.content)
	require.NoError(t, err)
	require.Equal(t, s.encode(), stored.encode())
}

func TestTransportIDs(t *testing.T) {
	for _, p := range []InitiatorPort{
		{Name: "a"},
		{Name: "iqn.1994-05.com.example:initiator", ISID: [6]byte{0, 2, 0x3d, 0xff, 0xab, 0xcd}},
		{Name: "iqn.x,i,0x0123456789ab"},
		{Name: strings.Repeat("é", 111)},
		{Name: strings.Repeat("a", maxISCSIName)},
	} {
		b := appendTransportID(nil, p)
		require.Zero(t, len(b)%4)
		id, n, err := parseTransportID(append(b, 0xff), 28)
		require.NoError(t, err)
		require.Equal(t, len(b), n)
		require.Equal(t, transportID{port: p}, id)
	}
}

// FuzzPersistOut sends arbitrary parameter lists to every service action. The target never fails by
// itself, a command that fails changes nothing, and the reported state can be read back.
func FuzzPersistOut(f *testing.F) {
	for action := byte(0); action <= saRegisterIgnore; action++ {
		for _, more := range [][]byte{nil, {bitAPTPL},
			specified(nodeID("iqn.b"), portID("iqn.c", 1))} {
			_, list := persistOut(action, 1, 1, 2, more...)
			f.Add(action, byte(1), list)
			_, list = persistOut(action, 1, 0, 2, more...)
			f.Add(action, byte(7), list)
		}
	}
	f.Add(byte(saRegisterAndMove), byte(0),
		moveList(1, 9, bitUnreg|bitAPTPL, InitiatorPort{Name: "iqn.b"}))
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
				id, size, err := parseTransportID(rest[24:24+length], 0)
				require.NoError(t, err)
				require.Equal(t, length, size)
				require.NotNil(t, b.d.nth(0).persistent.state.Load().find(id.port))
				rest = rest[24+length:]
			}
		}
		_, err := decodePersistent(m.content)
		require.NoError(t, err)
	})
}
