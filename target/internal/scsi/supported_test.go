package scsi

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestReportOpcodesOfOneCommand(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct{ name, cdb, want, data string }{
		{"by operation code", "a3 0c 01 28 00 00 00 00 01 00 00 00", "GOOD",
			"00 03 000a 28 18 ffffffff 00 ffff 00"},
		{"with timeouts", "a3 0c 81 00 00 00 00 00 01 00 00 00", "GOOD",
			"00 83 0006 00 00 00 00 00 00 000a 00 00 00000000 0000000a"},
		{"not supported", "a3 0c 01 ff 00 00 00 00 01 00 00 00", "GOOD", "00 01 0000"},
		{"with a service action", "a3 0c 02 9e 00 10 00 00 01 00 00 00", "GOOD",
			"00 03 0010 9e 10 0000000000000000 ffffffff 00 00"},
		{"service action not supported", "a3 0c 02 9e 00 11 00 00 01 00 00 00", "GOOD",
			"00 01 0000"},
		{"service action of two bytes", "a3 0c 02 9e 01 10 00 00 01 00 00 00", "GOOD",
			"00 01 0000"},
		{"operation code not supported with a service action",
			"a3 0c 02 7f 00 10 00 00 01 00 00 00", "GOOD", "00 01 0000"},
		{"either, with", "a3 0c 03 9e 00 10 00 00 01 00 00 00", "GOOD",
			"00 03 0010 9e 10 0000000000000000 ffffffff 00 00"},
		{"either, without", "a3 0c 03 00 00 00 00 00 01 00 00 00", "GOOD",
			"00 03 0006 00 00 00 00 00 00"},
		{"either, without but asked for", "a3 0c 03 00 00 01 00 00 01 00 00 00", "GOOD",
			"00 01 0000"},
		{"service action is missing", "a3 0c 01 9e 00 10 00 00 01 00 00 00", "5/24/00", ""},
		{"service action is too much", "a3 0c 02 28 00 00 00 00 01 00 00 00", "5/24/00", ""},
		{"reserved option", "a3 0c 04 28 00 00 00 00 01 00 00 00", "5/24/00", ""},
		{"cut off", "a3 0c 01 28 00 00 00 00 00 05 00 00", "GOOD", "00 03 000a 28"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := b.run(cdb(c.cdb), nil)
			require.Equal(t, c.want, r.outcome())
			requireHex(t, c.data, r.data)
		})
	}
}

func TestReportAllOpcodes(t *testing.T) {
	for _, change := range []func(*LUN){plainDisk, func(*LUN) {}} {
		b := newBench(t, change)
		plain := b.good(cdb("a3 0c 00 00 00 00 00 01 00 00 00 00"), nil)
		timed := b.good(cdb("a3 0c 80 00 00 00 00 01 00 00 00 00"), nil)
		commands := b.d.nth(0).table().commands
		require.Len(t, plain, 4+8*len(commands))
		require.EqualValues(t, len(plain)-4, binary.BigEndian.Uint32(plain))
		require.Len(t, timed, 4+20*len(commands))
		require.EqualValues(t, len(timed)-4, binary.BigEndian.Uint32(timed))
		previous := -1
		for i := range commands {
			c := &commands[i]
			d, timedOne := plain[4+8*i:][:8], timed[4+20*i:][:20]
			action := byte(0)
			if c.hasAction {
				action = 1
			}
			require.Equal(t, []byte{c.opcode, 0, 0, c.action, 0, action, 0, byte(len(c.usage))}, d,
				c.name)
			require.Equal(t, action|2, timedOne[5], c.name)
			require.EqualValues(t, 10, timedOne[9], c.name)
			order := int(c.opcode)<<8 | int(c.action)
			require.Greater(t, order, previous, "%s: in order and unique", c.name)
			previous = order
		}
	}
}

// TestUsageMapIsWhatIsAccepted sets every bit that a command's usage map leaves out, which must be
// refused with a pointer to that bit, on every command.
func TestUsageMapIsWhatIsAccepted(t *testing.T) {
	b := newBench(t, stored)
	for i := range b.d.nth(0).table().commands {
		c := &b.d.nth(0).table().commands[i]
		require.Contains(t, []int{6, 10, 12, 16}, len(c.usage), c.name)
		require.Equal(t, c.opcode, c.usage[0], c.name)
		for at := 1; at < len(c.usage); at++ {
			for bit := range 8 {
				if c.usage[at]&(1<<bit) != 0 || at == 1 && (c.hasAction && bit < 5 ||
					c.ignore&(1<<bit) != 0) {
					continue
				}
				request := make([]byte, 16)
				request[0] = c.opcode
				if c.hasAction {
					request[1] = c.action
				}
				request[at] |= 1 << bit
				r := b.run(request, nil)
				require.Equal(t, "5/24/00", r.outcome(), "%s byte %d bit %d", c.name, at, bit)
				require.Equal(t, []byte{0xc8 | byte(bit), 0, byte(at)}, r.sense[15:18],
					"%s byte %d bit %d", c.name, at, bit)
			}
		}
	}
}

// TestUnknownOpcodes checks that commands that are not in the table are refused.
func TestUnknownOpcodes(t *testing.T) {
	b := newBench(t)
	table := b.d.nth(0).table()
	for op := range 256 {
		if table.first[op] == 0 {
			require.Equal(t, "5/20/00", b.run([]byte{byte(op), 0, 0, 0, 0, 0}, nil).outcome(),
				"%02x", op)
			continue
		}
		for action := range 32 {
			if c := &table.commands[table.first[op]-1]; c.hasAction &&
				table.find(byte(op), uint16(action)) == nil {
				require.Equal(t, "5/24/00", b.run([]byte{byte(op), byte(action)}, nil).outcome(),
					"%02x/%02x", op, action)
			}
		}
	}
}

func TestReportTaskManagement(t *testing.T) {
	b := newBench(t)
	requireHex(t, "da 00 00 00", b.good(cdb("a3 0d 00 00 00 00 00 00 01 00 00 00"), nil))
	requireHex(t, "da 00 00 0c 000000000000000000000000",
		b.good(cdb("a3 0d 80 00 00 00 00 00 01 00 00 00"), nil))
	b.nexus.SetProtocolLevel(2)
	requireHex(t, "de 07 00 00", b.good(cdb("a3 0d 00 00 00 00 00 00 01 00 00 00"), nil))
	require.Equal(t, "5/24/00", b.run(cdb("a3 0d 00 00 00 00 00 00 00 03 00 00"), nil).outcome())
}

// FuzzCommand sends arbitrary CDBs with arbitrary data through the whole life of a command.
func FuzzCommand(f *testing.F) {
	seed := newBench(f, stored)
	for i := range seed.d.nth(0).table().commands {
		c := &seed.d.nth(0).table().commands[i]
		request := make([]byte, 16)
		copy(request, c.usage)
		f.Add(request, pattern(2, 1), uint8(1), false)
		for at := 2; at < len(request); at++ {
			request[at] &= 1
		}
		f.Add(request, make([]byte, 2*BlockSize), uint8(3), false)
	}
	f.Add([]byte{opUnmap, 0, 0, 0, 0, 0, 0, 0, 24, 0}, unmapList(0, 8), uint8(1), false)
	list := copyParameters(1, 0, []string{ownNAA}, block(0, 0, 8, 0, 100),
		block(0xffff, 0, 600, 0, 1000))
	f.Add(extendedCopy(list), list, uint8(1), false)
	f.Add([]byte{opModeSelect6, bitPF, 0, 0, 4, 0}, make([]byte, 4), uint8(1), true)
	f.Fuzz(func(t *testing.T, request, data []byte, chunk uint8, plain bool) {
		changes := []func(*LUN){func(l *LUN) { l.Disk = thinDisk{newMemDisk(1 << 20)} }, stored}
		if plain {
			changes = append(changes, plainDisk)
		}
		b := newBench(t, changes...)
		task := &Task{Nexus: b.nexus, LUN: lun1}
		copy(task.CDB[:], request)
		end := func(err error) {
			status, sense := b.d.Outcome(task, err, nil)
			require.NotEqual(t, StatusGood, status)
			require.LessOrEqual(t, len(sense), 252)
			require.NotEqual(t, "4/44/00", result{sense: sense}.code(),
				"nothing that an initiator sends is our failure")
		}
		cmd, _ := b.d.nth(0).table().lookup(&task.CDB)
		if err := b.d.Prepare(task); err != nil {
			end(err)
			return
		}
		require.NotNil(t, cmd, "a command that is not in the table is refused")
		for i := 1; i < len(cmd.usage); i++ {
			may := cmd.usage[i]
			if i == 1 {
				may |= cmd.ignore
			}
			require.Zero(t, task.CDB[i]&^may,
				"%s accepts a bit of byte %d that it does not report", cmd.name, i)
		}
		require.Equal(t, task.Length > 0, task.Dir != DirNone)
		require.LessOrEqual(t, task.Length, int64(maxTransfer))
		if task.Gather {
			require.LessOrEqual(t, task.Length, int64(2*maxCompareAndWrite))
		}
		step := int64(max(chunk, 1)) * 4096
		var err error
		switch task.Dir {
		case DirIn:
			p := make([]byte, min(step, task.Length))
			for off := int64(0); off < task.Length && err == nil; off += step {
				err = task.In(off, p[:min(step, task.Length-off)])
			}
		case DirOut:
			data = data[:min(int64(len(data)), task.Length)]
			if task.Gather {
				step = task.Length
			}
			for off := int64(0); off < int64(len(data)) && err == nil; off += step {
				err = task.Out(off, data[off:min(off+step, int64(len(data)))])
			}
		}
		if err != nil {
			end(err)
			return
		}
		if _, err := task.Finish(); err != nil {
			end(err)
		}
		task.Reset()
		require.Zero(t, task.Length)
	})
}
