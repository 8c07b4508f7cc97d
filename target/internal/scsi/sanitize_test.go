package scsi

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/serving"
)

const (
	blockErase  = "48 02 00 00 00 00 00 00 00 00"
	cryptoErase = "48 03 00 00 00 00 00 00 00 00"
	exitFailure = "48 1f 00 00 00 00 00 00 00 00"
	inProgress  = "2/04/1b"
	mediumLost  = "3/31/03"
)

// overwrite is SANITIZE with OVERWRITE, with the bits of byte 1, the first byte of the parameter
// list, and the pattern.
func overwrite(bits, first byte, pattern []byte) (request, list []byte) {
	list = append([]byte{first, 0, byte(len(pattern) >> 8), byte(len(pattern))}, pattern...)
	request = []byte{opSanitize, saOverwrite | bits, 0, 0, 0, 0, 0, 0, 0, 0}
	binary.BigEndian.PutUint16(request[7:], uint16(len(list)))
	return request, list
}

func TestSanitizeOverwrite(t *testing.T) {
	block := pattern(1, 5)
	inverted := bytes.Clone(block)
	for i := range inverted {
		inverted[i] = ^inverted[i]
	}
	for _, c := range []struct {
		name    string
		first   byte
		pattern []byte
		want    []byte // each block afterwards
		flushes int
	}{
		{"a block", 1, block, block, 1},
		{"a byte", 1, []byte{7}, bytes.Repeat([]byte{7}, BlockSize), 1},
		{"three bytes, the last copy cut off", 1, []byte{1, 2, 3},
			bytes.Repeat([]byte{1, 2, 3}, BlockSize)[:BlockSize], 1},
		{"two passes", 2, block, block, 2},
		{"two passes, the second inverted", 2 | bitInvert, block, inverted, 2},
		{"three passes, the second inverted", 3 | bitInvert, block, block, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			b.good(cdb("2a 00 00 00 00 10 00 00 01 00"), make([]byte, BlockSize))
			request, list := overwrite(0, c.first, c.pattern)
			b.good(request, list)
			require.Equal(t, bytes.Repeat(c.want, 64), b.read(0, 64))
			require.Equal(t, bytes.Repeat(c.want, 64), b.read(testBlocks-64, 64))
			require.Equal(t, c.flushes, b.disk.count("flush"), "each pass reaches storage")
			require.Zero(t, b.disk.count("zero")+b.disk.count("discard"),
				"what is to be overwritten is written")
		})
	}
}

func TestSanitizeRefuses(t *testing.T) {
	full := make([]byte, BlockSize)
	for _, c := range []struct {
		name, cdb, list, want string
	}{
		{"parameter list of a header", "48 01 00 00 00 00 00 00 04 00", "01 00 0000", "5/24/00"},
		{"no parameter list", "48 01 00 00 00 00 00 00 00 00", "", "5/24/00"},
		{"parameter list of more than a block", "48 01 00 00 00 00 00 02 05 00",
			"01 00 0200" + string(bytes.Repeat([]byte("00"), 513)), "5/24/00"},
		{"no passes", "48 01 00 00 00 00 00 00 05 00", "00 00 0001 00", "5/26/00"},
		{"no pattern", "48 01 00 00 00 00 00 00 05 00", "01 00 0000 00", "5/26/00"},
		{"pattern of more than a block", "48 01 00 00 00 00 00 00 05 00", "01 00 0201 00",
			"5/26/00"},
		{"pattern of more than was sent", "48 01 00 00 00 00 00 00 05 00", "01 00 0002 00",
			"5/1a/00"},
		{"test field", "48 01 00 00 00 00 00 00 05 00", "21 00 0001 00", "5/26/00"},
		{"reserved byte", "48 01 00 00 00 00 00 00 05 00", "01 01 0001 00", "5/26/00"},
		{"less than the parameter list", "48 01 00 00 00 00 00 00 06 00", "01 00 0002 00",
			"5/0e/03"},
		{"block erase with parameters", "48 02 00 00 00 00 00 00 08 00", "", "5/24/00"},
		{"exit failure mode with parameters", "48 1f 00 00 00 00 00 00 08 00", "", "5/24/00"},
		{"cryptographic erase with parameters", "48 03 00 00 00 00 00 00 08 00", "", "5/24/00"},
		{"unknown service action", "48 00 00 00 00 00 00 00 00 00", "", "5/24/00"},
		{"reserved bit", "48 42 00 00 00 00 00 00 00 00", "", "5/24/00"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			require.Equal(t, c.want, b.run(cdb(c.cdb), unhex(c.list)).outcome())
			require.Zero(t, b.disk.count("write")+b.disk.count("discard"))
			b.good(cdb(testReady), nil)
		})
	}
	request, list := overwrite(0, 1, full)
	require.Equal(t, "7/27/00", newBench(t, readOnly).run(request, list).outcome())
	for _, erase := range []string{blockErase, cryptoErase} {
		require.Equal(t, "7/27/00", newBench(t, readOnly).run(cdb(erase), nil).outcome())
		require.Equal(t, "5/24/00", newBench(t, plainDisk).run(cdb(erase), nil).outcome(),
			"a disk that gives nothing back")
	}
	b := newBench(t)
	other := b.attach("iqn.b", 0)
	require.Equal(t, "GOOD", b.runAs(other, lun1, cdb("16 00 00 00 00 00"), nil).outcome())
	require.Equal(t, conflict, b.run(request, list).outcome())
	require.Equal(t, conflict, b.run(cdb(blockErase), nil).outcome())
	require.Equal(t, conflict, b.run(cdb(cryptoErase), nil).outcome())
	removable := newBench(t, removableLUN)
	removable.good(cdb(eject), nil)
	require.Equal(t, "2/3a/00", removable.run(cdb(blockErase), nil).outcome())
	require.Equal(t, "2/3a/00", removable.run(cdb(cryptoErase), nil).outcome())
}

func TestSanitizeBlockErase(t *testing.T) {
	b := newBench(t)
	b.good(cdb("2a 00 00 00 00 10 00 00 08 00"), pattern(8, 1))
	b.good(cdb(blockErase), nil)
	require.Zero(t, b.disk.allocated())
	require.Equal(t, make([]byte, 8*BlockSize), b.read(0x10, 8))
	require.Equal(t, 1, b.disk.count("flush"))
	requireHex(t, "00000014 00000000 0000000000000000 00002000 01 000000",
		b.good(cdb("9e 12 00 00 00 00 00 00 00 00 00 00 00 18 00 00"), nil))
}

// TestSanitizeInSteps erases a disk that is larger than one step, to its last block.
func TestSanitizeInSteps(t *testing.T) {
	for _, erase := range []string{blockErase, cryptoErase} {
		b := newBench(t, func(l *LUN) { l.Disk = thinDisk{newMemDisk(2*eraseStep + 3*memPage)} })
		b.disk = b.d.nth(0).Disk.(thinDisk).memDisk
		for _, lba := range []uint32{0, eraseStep/BlockSize - 8, eraseStep / BlockSize,
			2 * eraseStep / BlockSize, (2*eraseStep + 2*memPage) / BlockSize} {
			b.write(lba, pattern(8, 1))
		}
		b.good(cdb(erase), nil)
		require.Zero(t, b.disk.allocated())
		require.Equal(t, 3, b.disk.count("discard"))
	}
}

// stalled is a bench whose disk stops in its first write until release is called.
func stalled(t *testing.T, change ...func(*LUN)) (b *bench, entered <-chan struct{},
	release func()) {
	b = newBench(t, change...)
	inside, gate := make(chan struct{}), make(chan struct{})
	first := true
	b.disk.enter = func(method string) {
		if method == "write" && first {
			first = false
			close(inside)
			<-gate
		}
	}
	return b, inside, func() { close(gate) }
}

func TestCommandsDuringSanitize(t *testing.T) {
	b, entered, release := stalled(t)
	other := b.attach("iqn.b", 0)

	// A write that is already under way when the operation begins waits for its data meanwhile.
	early := &Task{Nexus: other, LUN: lun1}
	copy(early.CDB[:], cdb(writeOne))
	require.NoError(t, b.d.Prepare(early))

	request, list := overwrite(bitImmedSanitize, 2, []byte{0xaa})
	b.good(request, list)
	<-entered
	_, sense := b.d.Outcome(early, early.Out(0, pattern(1, 1)), nil)
	require.Equal(t, inProgress, result{sense: sense}.code())

	again, list := overwrite(0, 1, []byte{0xbb})
	for _, c := range []struct {
		cdb  []byte
		data []byte
		want string
	}{
		{cdb(testReady), nil, inProgress},
		{cdb(readOne), nil, inProgress},
		{cdb(writeOne), pattern(1, 1), inProgress},
		{cdb("25 00 00 00 00 00 00 00 00 00"), nil, inProgress},
		{cdb("1a 00 3f 00 ff 00"), nil, inProgress},
		{cdb("1b 00 00 00 01 00"), nil, inProgress},
		{cdb("35 00 00 00 00 00 00 00 00 00"), nil, inProgress},
		{again, list, inProgress},
		{cdb(blockErase), nil, inProgress},
		{cdb(cryptoErase), nil, inProgress},
		{cdb(exitFailure), nil, inProgress},
		{cdb("12 00 00 00 24 00"), nil, "GOOD"},
		{cdb("a0 00 00 00 00 00 00 00 01 00 00 00"), nil, "GOOD"},
		{cdb("ff 00 00 00 00 00"), nil, "5/20/00"},
	} {
		for _, n := range []*Nexus{b.nexus, other} {
			require.Equal(t, c.want, b.runAs(n, lun1, c.cdb, c.data).outcome(), "%x", c.cdb)
		}
	}
	sense = b.good(cdb("03 00 00 00 ff 00"), nil)
	require.Equal(t, inProgress, result{sense: sense}.code())
	require.EqualValues(t, 0x80, sense[15], "the progress is valid")
	require.Zero(t, binary.BigEndian.Uint16(sense[16:]), "nothing is written yet")

	// Resets, and the end of the nexus that began it, do not stop it.
	b.d.ResetLUN(lun1)
	b.d.ResetTarget()
	b.d.Detach(b.nexus)
	back := b.attach("iqn.a", 1)
	require.Equal(t, inProgress, b.runAs(back, lun1, cdb(testReady), nil).outcome())
	run := b.d.nth(0).sanitizing.running
	release()
	<-run.done
	require.Equal(t, "GOOD", b.runAs(back, lun1, cdb(testReady), nil).outcome())
	r := b.runAs(back, lun1, cdb(readOne), nil)
	require.Equal(t, bytes.Repeat([]byte{0xaa}, BlockSize), r.data)
}

func TestSanitizeProgress(t *testing.T) {
	b := newBench(t)
	u := b.d.nth(0)
	run := &sanitizeRun{unit: u, passes: 4, size: u.Disk.Size()}
	run.advance(u.Disk.Size())
	require.EqualValues(t, 1<<14, u.sanitizing.progress.Load(), "one pass of four")
	requireHex(t, "70 00 02 00000000 0a 00000000 04 1b 00 80 4000",
		u.sanitizing.inProgress().appendTo(nil, false))
	requireHex(t, "72 02 04 1b 000000 08 02 06 0000 80 4000 00",
		u.sanitizing.inProgress().appendTo(nil, true))
	run.advance(3 * u.Disk.Size())
	requireHex(t, "80 ffff", u.sanitizing.inProgress().appendTo(nil, false)[15:])
}

func TestSanitizeWaitsForWhatIsUnderWay(t *testing.T) {
	b, entered, release := stalled(t)
	written := make(chan result)
	go func() { written <- drive(b.d, b.nexus, lun1, cdb(writeOne), pattern(1, 1), 8192) }()
	<-entered
	request, list := overwrite(bitImmedSanitize, 1, []byte{0xaa})
	other := b.attach("iqn.b", 0)
	require.Equal(t, "GOOD", b.runAs(other, lun1, request, list).outcome())
	run := b.d.nth(0).sanitizing.running
	require.Equal(t, inProgress, b.runAs(other, lun1, cdb(testReady), nil).outcome())
	release()
	require.Equal(t, StatusGood, (<-written).status)
	<-run.done
	r := b.runAs(other, lun1, cdb(readOne), nil)
	require.Equal(t, bytes.Repeat([]byte{0xaa}, BlockSize), r.data,
		"the older write did not land on top")
}

func TestSanitizeThatFails(t *testing.T) {
	for _, c := range []struct {
		name string
		bits byte
		exit string
		then string
	}{
		{"restricted", 0, "5/24/00", mediumLost},
		{"unrestricted", bitAUSE, "GOOD", "GOOD"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			b.good(cdb(exitFailure), nil) // nothing has failed
			b.disk.failWith("write", errors.New("broken"))
			request, list := overwrite(c.bits, 1, []byte{1})
			require.Equal(t, mediumLost, b.run(request, list).outcome())
			b.disk.failWith("write", nil)
			for _, request := range []string{testReady, readOne, "25 00 00 00 00 00 00 00 00 00"} {
				require.Equal(t, mediumLost, b.run(cdb(request), nil).outcome(), request)
			}
			require.Equal(t, mediumLost, b.run(cdb(writeOne), pattern(1, 1)).outcome())
			b.good(cdb("12 00 00 00 24 00"), nil)
			b.good(cdb("1a 00 3f 00 ff 00"), nil)
			b.d.ResetLUN(lun1)
			require.Equal(t, "6/29/03", b.run(cdb(testReady), nil).outcome())
			require.Equal(t, mediumLost, b.run(cdb(testReady), nil).outcome(),
				"a reset changes nothing")

			require.Equal(t, c.exit, b.run(cdb(exitFailure), nil).outcome())
			require.Equal(t, c.then, b.run(cdb(testReady), nil).outcome())
			b.good(cdb(blockErase), nil)
			b.good(cdb(testReady), nil)
		})
	}
}

// panics counts the panics that it is told of.
type panics struct {
	serving.Observer
	n int
}

func (p *panics) PanicCaught() { p.n++ }

func TestSanitizePanic(t *testing.T) {
	m := newMemDisk(1 << 20)
	d, err := NewDevice(Options{},
		[]LUN{{Number: 1, Disk: thinDisk{m}, Identity: testIdentity(), Access: AccessWriteShared}})
	require.NoError(t, err)
	seen := &panics{}
	d.disks.Observer = seen
	t.Cleanup(d.Close)
	b := &bench{t: t, d: d, disk: m}
	b.nexus = b.attach("iqn.a", 0)
	m.enter = func(method string) {
		if method == "discard" {
			panic("a bug")
		}
	}
	require.Equal(t, mediumLost, b.run(cdb(blockErase), nil).outcome())
	require.Equal(t, 1, seen.n)
	m.enter = nil
	b.good(cdb(blockErase), nil)
	b.good(cdb(writeOne), pattern(1, 1))
}

func TestCloseInterruptsSanitize(t *testing.T) {
	store := &keptStore{}
	b, entered, release := stalled(t, func(l *LUN) { l.Store = store })
	request, list := overwrite(bitImmedSanitize|bitAUSE, 31, []byte{1})
	b.good(request, list)
	<-entered
	run := b.d.nth(0).sanitizing.running
	b.d.background.cancel()
	release()
	b.d.Close()
	<-run.done
	require.LessOrEqual(t, b.disk.count("write"), 2)
	require.Equal(t, mediumLost, b.run(cdb(testReady), nil).outcome())
	require.Equal(t, "4/44/00", b.run(cdb(blockErase), nil).outcome(),
		"a device that is closed begins nothing")

	again := newBench(t, func(l *LUN) { l.Store = store })
	require.Equal(t, mediumLost, again.run(cdb(readOne), nil).outcome(), "it comes back as it went")
	again.good(cdb(exitFailure), nil)
	again.good(cdb(readOne), nil)
	last := newBench(t, func(l *LUN) { l.Store = store })
	last.good(cdb(readOne), nil)
}

// TestFailedSanitizeStaysOnStorage has a store that reports a failure although it has kept, or
// forgotten, the state of a unit whose operation failed. The next start must find the medium lost,
// as initiators do now.
func TestFailedSanitizeStaysOnStorage(t *testing.T) {
	for name, request := range map[string]string{"another operation": blockErase,
		"EXIT FAILURE MODE": exitFailure} {
		t.Run(name, func(t *testing.T) {
			store := &unsureStore{}
			b := newBench(t, func(l *LUN) { l.Store = store })
			b.disk.failWith("write", errors.New("broken"))
			overwriting, list := overwrite(bitAUSE, 1, []byte{1})
			require.Equal(t, mediumLost, b.run(overwriting, list).outcome())
			store.unsure = true
			require.Equal(t, "4/44/00", b.run(cdb(request), nil).outcome())
			require.Equal(t, mediumLost, b.run(cdb(testReady), nil).outcome())
			again := newBench(t, func(l *LUN) { l.Store = store })
			require.Equal(t, mediumLost, again.run(cdb(readOne), nil).outcome())
		})
	}
	t.Run("the end of an operation", func(t *testing.T) {
		store := &unsureStore{}
		b := newBench(t, func(l *LUN) { l.Store = store })
		b.disk.enter = func(string) { store.unsure = true }
		require.Equal(t, mediumLost, b.run(cdb(blockErase), nil).outcome())
		again := newBench(t, func(l *LUN) { l.Store = store })
		require.Equal(t, mediumLost, again.run(cdb(readOne), nil).outcome())
	})
}

func FuzzOverwrite(f *testing.F) {
	_, list := overwrite(0, 3|bitInvert, []byte{1, 2, 3})
	f.Add(list)
	f.Add([]byte{0, 0, 0, 1, 0})
	f.Fuzz(func(t *testing.T, list []byte) {
		if len(list) <= overwriteHeaderLen || len(list) > overwriteHeaderLen+BlockSize {
			return // prepareOverwrite has refused it
		}
		run, err := parseOverwrite(list, BlockSize)
		if err != nil {
			require.Nil(t, run)
			return
		}
		require.Len(t, run.pattern, BlockSize)
		require.True(t, run.passes >= 1 && run.passes <= 31)
		n := int(binary.BigEndian.Uint16(list[2:]))
		require.Equal(t, list[overwriteHeaderLen:overwriteHeaderLen+n], run.pattern[:n])
	})
}
