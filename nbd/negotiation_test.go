package nbd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/serving"
)

func asTimeout(err error, to *net.Error) bool { return errors.As(err, to) && (*to).Timeout() }

// last requires that an option has one answer, of that kind.
func (c *client) last(number uint32, data []byte, kind uint32) []byte {
	c.t.Helper()
	all := c.option(number, data)
	require.Len(c.t, all, 1)
	require.Equal(c.t, kind, all[0].kind, "%s", all[0].data)
	return all[0].data
}

// TestWrongOptions sends options that break the rules, each with an answer, on one connection that
// lives on.
func TestWrongOptions(t *testing.T) {
	v := serve(t, 2, nil)
	c := v.hello(t)
	for _, number := range []uint32{optList, optStartTLS, optStructuredReply, optExtendedHeaders} {
		c.last(number, []byte{1}, repErrInvalid)
	}
	c.last(optStartTLS, nil, repErrPolicy)
	for _, number := range []uint32{0, 4, 12, 1 << 31, 1<<32 - 1} {
		c.last(number, nil, repErrUnsup)
		c.last(number, make([]byte, 77), repErrUnsup)
	}
	for _, number := range []uint32{optList, optInfo, optGo, optSetMeta, optListMeta, 99} {
		c.last(number, make([]byte, maxOption+1), repErrTooBig)
		c.last(number, make([]byte, 1<<20), repErrTooBig)
	}
	for _, number := range []uint32{optInfo, optGo} {
		for name, data := range map[string][]byte{
			"nothing":            {},
			"half a length":      {0, 0},
			"no count":           text("disk1.raw"),
			"a name too long":    append(u32(1<<32-1), "disk1.raw"...),
			"an info too few":    append(text("disk1.raw"), 0, 2, 0, 1),
			"a byte too many":    append(infoData("disk1.raw"), 0),
			"a zero in the name": infoData("disk1.raw\x00"),
			"4097 bytes of name": infoData(strings.Repeat("x", 4097)),
		} {
			all := c.option(number, data)
			require.Equal(t, uint32(repErrInvalid), all[0].kind, "%s: %s", name, all[0].data)
		}
		c.last(number, infoData("disk3.raw"), repErrUnknown)
		c.last(number, infoData("3"), repErrUnknown)
		c.last(number, infoData("01"), repErrUnknown)
		c.last(number, infoData("65537"), repErrUnknown)
		names := c.last(number, infoData(""), repErrUnknown)
		require.Contains(t, string(names), `"disk1.raw" "disk2.raw"`)
	}
	c.last(optSetMeta, metaData("disk1.raw", "base:allocation"), repErrInvalid) // not structured
	c.last(optStructuredReply, nil, repAck)
	c.last(optStructuredReply, nil, repAck)
	for _, number := range []uint32{optSetMeta, optListMeta} {
		c.last(number, nil, repErrInvalid)
		c.last(number, append(metaData("disk1.raw"), 0), repErrInvalid)
		c.last(number, append(text("disk1.raw"), 0xff, 0xff, 0xff, 0xff), repErrInvalid)
		c.last(number, metaData("disk1.raw", "a\x00b"), repErrInvalid)
		c.last(number, metaData("disk3.raw", "base:allocation"), repErrUnknown)
		c.last(number, metaData("disk1.raw", "base:allocatio", "x:", "qemu:dirty-bitmap:y"), repAck)
	}
	c.choose("disk1.raw", structured)
	c.alive()
	require.Equal(t, uint64(diskSize), c.size)
}

// TestWhatEndsTheNegotiation: what cannot be answered ends the connection, and only that one.
func TestWhatEndsTheNegotiation(t *testing.T) {
	v := serve(t, 2, nil)
	for name, sent := range map[string][]byte{
		"unknown client flags":      u32(flagFixedNewstyle | 1<<2),
		"a wrong magic":             join(u32(3), u64(magicOption+1), u32(optList), u32(0)),
		"an option of 33 MiB":       join(u32(3), u64(magicOption), u32(optInfo), u32(33<<20)),
		"EXPORT_NAME, no such disk": join(u32(3), optionBytes(optExportName, []byte("disk3.raw"))),
		"EXPORT_NAME, two disks":    join(u32(3), optionBytes(optExportName, nil)),
		"EXPORT_NAME, zero byte":    join(u32(3), optionBytes(optExportName, []byte("1\x00"))),
		"EXPORT_NAME, too long": join(u32(3),
			optionBytes(optExportName, make([]byte, maxOption+1))),
	} {
		t.Run(name, func(t *testing.T) {
			c := v.dial(t)
			c.send(sent)
			c.ended()
		})
	}
	c := v.hello(t)
	c.last(optExtendedHeaders, nil, repAck)
	c.send(optionBytes(optExportName, []byte("disk1.raw")))
	c.ended()
	c = v.hello(t)
	c.last(optAbort, nil, repAck)
	c.ended()
	c = v.hello(t)
	for range maxOptions {
		c.last(77, nil, repErrUnsup)
	}
	c.ended()
	c = v.open(t, "disk1.raw", compact)
	c.alive()
}

func TestExportName(t *testing.T) {
	v := serve(t, 1, nil)
	for _, noZeroes := range []bool{false, true} {
		for _, name := range []string{"", "disk1.raw", "1"} {
			c := v.dial(t)
			flags := uint32(flagFixedNewstyle)
			if noZeroes {
				flags |= flagNoZeroes
			}
			c.send(u32(flags), optionBytes(optExportName, []byte(name)))
			p := c.read(10)
			require.Equal(t, uint64(diskSize), binary.BigEndian.Uint64(p))
			require.Equal(t, uint16(flagHasFlags|flagSendFlush|flagSendFUA|flagSendTrim|
				flagSendZeroes|flagSendCache|flagSendFastZero|flagMultiConn),
				binary.BigEndian.Uint16(p[8:]))
			if !noZeroes {
				require.Equal(t, make([]byte, 124), c.read(124))
			}
			c.writeAt(512, []byte("hello"))
			require.Equal(t, []byte("hello"), c.readAt(512, 5))
		}
	}
}

// TestNamesThatAreNumbers: each name in the list leads to its disk, and so does each that a machine
// gets, also if two disks have one name and a third one is called like the number of the first.
// Names that XML does not have are not among them.
func TestNamesThatAreNumbers(t *testing.T) {
	names := []string{"2", "1", "2", "a\u3000b", "\xff"}
	v := serve(t, len(names), func(o *serving.Options) { o.Name = names[o.Number-1] })
	c := v.hello(t)
	for i, one := range c.option(optList, nil)[:len(names)] {
		name := string(one.data[4 : 4+binary.BigEndian.Uint32(one.data)])
		require.True(t, i < 3 || name == strconv.Itoa(i+1), name)
		require.Equal(t, v.Export(uint16(i+1)), name)
		all := c.option(optInfo, infoData(name, infoDescription))
		require.Len(t, all, 4, name)
		require.Contains(t, string(all[2].data), fmt.Sprintf("LUN %d,", i+1), name)
	}
}

// TestNames: a disk goes by its name and its number, and a name of two disks by neither.
func TestNames(t *testing.T) {
	v := serve(t, 4, func(o *serving.Options) {
		switch o.Number {
		case 2:
			o.Name = "disk1.raw" // a second one
		case 3:
			o.Name = "4" // another one's number
		}
	})
	c := v.hello(t)
	all := c.option(optList, nil)
	require.Len(t, all, 5)
	for i, want := range []string{"1", "2", "4", "disk4.raw"} {
		require.Equal(t, uint32(repServer), all[i].kind)
		n := binary.BigEndian.Uint32(all[i].data)
		require.Equal(t, want, string(all[i].data[4:4+n]))
	}
	what := c.last(optInfo, infoData("disk1.raw"), repErrUnknown)
	require.Contains(t, string(what), "LUN 1 and LUN 2")
	for name, lun := range map[string]string{"1": "LUN 1,", "2": "LUN 2,", "4": "LUN 3,",
		"3": "LUN 3,", "disk4.raw": "LUN 4,"} {
		all := c.option(optInfo, infoData(name, infoDescription, infoName, 99, infoBlockSize))
		require.Len(t, all, 5, name)
		require.Contains(t, string(all[2].data), lun)
		require.Equal(t, u16(infoName), all[3].data[:2])
	}
	require.Equal(t, join(u16(infoBlockSize), u32(minBlock), u32(bestBlock), u32(maxBlock)),
		c.option(optInfo, infoData("1"))[1].data)
	require.Equal(t, minBlock, v.remote(t, "1").BlockSize())
	v = serve(t, 1, func(o *serving.Options) { o.BlockSize = disk.LongBlock })
	require.Equal(t, join(u16(infoBlockSize), u32(4096), u32(bestBlock), u32(maxBlock)),
		v.hello(t).option(optInfo, infoData("1"))[1].data)
	require.Equal(t, disk.LongBlock, v.remote(t, "1").BlockSize())
}

// TestOrderOfOptions: extended headers bring structured replies along, and not the reverse.
func TestOrderOfOptions(t *testing.T) {
	v := serve(t, 1, nil)
	c := v.hello(t)
	c.last(optExtendedHeaders, nil, repAck)
	c.last(optStructuredReply, nil, repErrExtHeaderReq)
	c.choose("", extended)
	require.NotZero(t, c.flags&flagStatusPayloads)
	c.alive()
	c = v.hello(t)
	c.last(optStructuredReply, nil, repAck)
	c.choose("", extended)
	c.alive()
	c = v.open(t, "", structured)
	require.Zero(t, c.flags&flagStatusPayloads)
	require.NotZero(t, c.flags&flagSendDF)
	c = v.open(t, "", compact)
	require.Zero(t, c.flags&flagSendDF)
}

// TestMetaContexts: contexts hold for the export for which they were chosen last, by that name.
func TestMetaContexts(t *testing.T) {
	v := serve(t, 2, nil)
	status := func(name string, sets ...[]byte) uint32 {
		c := v.hello(t)
		c.last(optStructuredReply, nil, repAck)
		c.structured = true
		for _, s := range sets {
			c.option(optSetMeta, s)
		}
		c.info(c.option(optGo, infoData(name)))
		return c.do(cmdBlockStatus, 0, 0, 4096, nil).code
	}
	set := metaData("disk1.raw", "base:allocation")
	require.Zero(t, status("disk1.raw", set))
	require.Equal(t, uint32(eInval), status("disk1.raw"))
	require.Equal(t, uint32(eInval), status("1", set))
	require.Equal(t, uint32(eInval), status("disk2.raw", set))
	require.Equal(t, uint32(eInval), status("disk1.raw", set, metaData("disk1.raw")))
	require.Equal(t, uint32(eInval), status("disk1.raw", set, nil), "a wrong one, too")
	require.Equal(t, uint32(eInval), status("disk1.raw", metaData("disk1.raw", "base:")),
		"a namespace chooses nothing")
	c := v.hello(t)
	c.last(optStructuredReply, nil, repAck)
	const base, depth = "base:allocation", "qemu:allocation-depth"
	contexts := func(option uint32, data []byte) (names []string) {
		all := c.option(option, data)
		for _, r := range all[:len(all)-1] {
			name, id := string(r.data[4:]), uint32(0)
			if option == optSetMeta {
				id = map[string]uint32{base: contextAllocation, depth: contextDepth}[name]
			}
			require.Equal(t, u32(id), r.data[:4])
			names = append(names, name)
		}
		return names
	}
	for _, want := range []struct{ names, queries []string }{
		{[]string{base, depth}, nil},
		{[]string{base}, []string{"base:"}},
		{[]string{base}, []string{base, "base:x", "qemu", "qemu:allocation-"}},
		{[]string{depth}, []string{"qemu:"}},
		{[]string{depth}, []string{depth, "qemu:", ""}},
		{nil, []string{"qemu:dirty-bitmap:"}},
		{[]string{base, depth}, []string{"x:", "qemu:", "base:"}},
	} {
		require.Equal(t, want.names, contexts(optListMeta, metaData("1", want.queries...)))
	}
	for _, want := range []struct{ names, queries []string }{
		{nil, nil},
		{nil, []string{"base:", "qemu:", ":", ""}},
		{[]string{base}, []string{"x:y", base, base}},
		{[]string{depth}, []string{depth}},
		{[]string{base, depth}, []string{depth, base}},
	} {
		require.Equal(t, want.names, contexts(optSetMeta, metaData("1", want.queries...)))
	}
}
