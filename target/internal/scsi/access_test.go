package scsi

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	readOne  = "28 00 00 00 00 00 00 00 01 00"
	writeOne = "2a 00 00 00 00 00 00 00 01 00"
	conflict = "RESERVATION CONFLICT"
)

func TestWriteExclusive(t *testing.T) {
	b := newBench(t, exclusive)
	second := b.attach("iqn.b", 0)
	require.Equal(t, "GOOD", b.ready(second), "nobody owns it yet")
	require.Equal(t, "GOOD", b.ready(b.nexus))
	require.Equal(t, "GOOD", b.reads(b.nexus),
		"the first that accesses the medium becomes the owner")
	twin := b.attach("iqn.a", 1)
	require.Equal(t, "GOOD", b.writes(twin), "a second session of the owner")

	for _, c := range []struct{ cdb, want string }{
		{testReady, conflict},
		{readOne, conflict},
		{writeOne, conflict},
		{"28 20 00 00 00 00 00 00 01 00", conflict},
		{"15 10 00 00 00 00", conflict},
		{"35 00 00 00 00 00 00 00 00 00", conflict},
		{"9e 12 00 00 00 00 00 00 00 00 00 00 00 18 00 00", conflict},
		{"1a 00 3f 00 ff 00", "GOOD"},
		{"5a 00 08 00 00 00 00 00 ff 00", "GOOD"},
		{"12 00 00 00 24 00", "GOOD"},
		{"a0 00 00 00 00 00 00 00 01 00 00 00", "GOOD"},
		{"03 00 00 00 ff 00", "GOOD"},
		{"25 00 00 00 00 00 00 00 00 00", "GOOD"},
		{"9e 10 00 00 00 00 00 00 00 00 00 00 00 20 00 00", "GOOD"},
		{"a3 0c 00 00 00 00 00 00 01 00 00 00", "GOOD"},
		{"ff 00 00 00 00 00", "5/20/00"},
	} {
		require.Equal(t, c.want, b.runAs(second, lun1, cdb(c.cdb), pattern(1, 1)).outcome(), c.cdb)
	}

	b.d.Detach(b.nexus)
	require.Equal(t, conflict, b.reads(second), "the owner has a nexus left")
	b.d.Detach(twin)
	b.d.Detach(twin)
	require.Equal(t, "GOOD", b.reads(second))
	back := b.attach("iqn.a", 0)
	require.Equal(t, conflict, b.reads(back), "it is the second one's now")
}

func TestRefusedCommandDoesNotClaim(t *testing.T) {
	b := newBench(t, exclusive)
	second := b.attach("iqn.b", 0)
	require.Equal(t, "5/21/00", b.run(cdb("28 00 ff 00 00 00 00 00 01 00"), nil).outcome())
	require.Equal(t, "GOOD", b.reads(second))
}

func TestOwnerReturnsAfterItsSession(t *testing.T) {
	b := newBench(t, exclusive)
	b.good(cdb(writeOne), pattern(1, 1))
	b.d.Detach(b.nexus)
	b.nexus = b.attach("iqn.a", 9)
	b.good(cdb(writeOne), pattern(1, 1))
}

// storing are commands that store something from block 0 on, in one call of the disk; each holds
// its blocks in its way.
var storing = map[string]struct {
	cdb  string
	data []byte
}{
	"WRITE": {writeOne, pattern(1, 1)},
	"COMPARE AND WRITE": {"89 00 00 00 00 00 00 00 00 00 00 00 00 01 00 00",
		append(make([]byte, BlockSize), pattern(1, 1)...)},
	"WRITE ATOMIC": {"9c 00 00 00 00 00 00 00 00 00 00 00 00 08 00 00", pattern(8, 1)},
}

// TestOwnerReturnsWhileAWriteIsStuck lets the owner come back and leave again while a write of its
// first session hangs in the disk. Nobody else gets the unit until that write has ended.
func TestOwnerReturnsWhileAWriteIsStuck(t *testing.T) {
	const elsewhere = "28 00 00 00 10 00 00 00 01 00"
	for name, c := range storing {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, exclusive, stored)
			stuck, release := b.hang("write")
			written := make(chan string)
			go func() { written <- b.run(cdb(c.cdb), c.data).outcome() }()
			<-stuck
			b.d.Detach(b.nexus)
			again := b.attach("iqn.a", 0)
			claimed := b.runAs(again, lun1, cdb(elsewhere), nil).outcome()
			b.d.Detach(again)
			other := b.attach("iqn.b", 0)
			early := b.runAs(other, lun1, cdb(elsewhere), nil).outcome()
			close(release)
			require.Equal(t, "GOOD", <-written)
			require.Equal(t, "GOOD", claimed)
			require.Equal(t, conflict, early)
			require.Equal(t, "GOOD", b.runAs(other, lun1, cdb(elsewhere), nil).outcome())
		})
	}
}

// TestSessionEndsOnce ends a session twice, as its reader and the one that reinstates it may at
// once. The owner's other session goes on.
func TestSessionEndsOnce(t *testing.T) {
	b := newBench(t, exclusive)
	b.good(cdb(writeOne), pattern(1, 1))
	again := b.attach("iqn.a", 1)
	b.d.Detach(again)
	b.d.Detach(again)
	require.Equal(t, conflict, b.reads(b.attach("iqn.b", 0)))
	b.good(cdb(writeOne), pattern(1, 1))
}

func TestEndedSessionDoesNotClaim(t *testing.T) {
	b := newBench(t, exclusive)
	b.d.Detach(b.nexus)
	require.Equal(t, conflict, b.reads(b.nexus))
	require.Equal(t, "GOOD", b.reads(b.attach("iqn.b", 0)))
}

func TestSharedModes(t *testing.T) {
	shared := newBench(t)
	for _, n := range []*Nexus{shared.nexus, shared.attach("iqn.b", 0)} {
		require.Equal(t, "GOOD", shared.writes(n))
	}
	for _, mode := range []func(*LUN){readSharedLUN, readOnly} {
		b := newBench(t, mode)
		for _, n := range []*Nexus{b.nexus, b.attach("iqn.b", 0)} {
			require.Equal(t, "GOOD", b.reads(n))
		}
	}
}

// TestWriteProtection checks every command that writes, and that none reaches the disk.
func TestWriteProtection(t *testing.T) {
	b := newBench(t, readOnly)
	for i := range b.d.nth(0).table().commands {
		c := &b.d.nth(0).table().commands[i]
		request := make([]byte, len(c.usage))
		request[0] = c.opcode
		if c.hasAction {
			request[1] = c.action
		}
		if r := b.run(request, nil); c.flags&writesMedium != 0 {
			require.Equal(t, "7/27/00", r.outcome(), c.name)
		} else {
			require.NotEqual(t, "7/27/00", r.outcome(), c.name)
		}
	}
	for _, method := range []string{"write", "discard", "zero"} {
		require.Zero(t, b.disk.count(method))
	}
}
