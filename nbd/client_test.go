package nbd

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// client is the other end of the protocol, which may break each of its rules.
type client struct {
	t testing.TB
	net.Conn
	in *bufio.Reader

	structured, extended bool
	bare                 bool // its writes lack PAYLOAD_LEN, as those of QEMU
	cookie               uint64
	size                 uint64
	flags                uint16
}

// optionReply is one answer to an option.
type optionReply struct {
	kind uint32
	data []byte
}

// answered is what came for a request.
type answered struct {
	code   uint32 // 0: no error
	text   string
	off    uint64            // of an error with an offset
	chunks []uint16          // kinds
	data   map[uint64][]byte // by offset
	holes  map[uint64]uint64 // length by offset
	status map[uint32][]extent
}

// dial connects and takes the greeting, without an answer.
func (v *served) dial(t testing.TB) *client {
	t.Helper()
	return greet(t, testtool.Must(net.Dial("unix", v.socket))(t))
}

func greet(t testing.TB, nc net.Conn) *client {
	t.Helper()
	t.Cleanup(func() { _ = nc.Close() })
	c := &client{t: t, Conn: nc, in: bufio.NewReader(nc)}
	hello := c.read(18)
	require.Equal(t, uint64(magicInit), binary.BigEndian.Uint64(hello))
	require.Equal(t, uint64(magicOption), binary.BigEndian.Uint64(hello[8:]))
	require.Equal(t, uint16(flagFixedNewstyle|flagNoZeroes), binary.BigEndian.Uint16(hello[16:]))
	return c
}

// hello is dial with the usual answer.
func (v *served) hello(t testing.TB) *client {
	t.Helper()
	c := v.dial(t)
	c.send(u32(flagFixedNewstyle | flagNoZeroes))
	return c
}

// How a client uses the protocol.
const (
	compact = iota
	structured
	extended
	extendedBare // extended, and writes come without PAYLOAD_LEN: QEMU 8.2 and later
)

// open is hello and GO, with base:allocation if the mode allows that.
func (v *served) open(t testing.TB, name string, mode int) *client {
	t.Helper()
	return v.openWith(t, name, mode, "base:allocation")
}

// openWith is open with other metadata contexts, which the server must have.
func (v *served) openWith(t testing.TB, name string, mode int, contexts ...string) *client {
	t.Helper()
	c := v.hello(t)
	c.choose(name, mode, contexts...)
	return c
}

func (c *client) choose(name string, mode int, contexts ...string) {
	c.t.Helper()
	if mode != compact {
		number := uint32(optStructuredReply)
		if mode >= extended {
			number = optExtendedHeaders
		}
		require.Equal(c.t, uint32(repAck), c.option(number, nil)[0].kind)
		c.structured, c.extended, c.bare = true, mode >= extended, mode == extendedBare
		require.Len(c.t, c.option(optSetMeta, metaData(name, contexts...)), len(contexts)+1)
	}
	c.info(c.option(optGo, infoData(name)))
}

// info takes what GO says.
func (c *client) info(all []optionReply) {
	c.t.Helper()
	last := all[len(all)-1]
	require.Equal(c.t, uint32(repAck), last.kind, "%s", last.data)
	for _, r := range all {
		if r.kind == repInfo && binary.BigEndian.Uint16(r.data) == infoExport {
			c.size = binary.BigEndian.Uint64(r.data[2:])
			c.flags = binary.BigEndian.Uint16(r.data[10:])
		}
	}
	require.NotZero(c.t, c.flags)
}

func u16(v uint16) []byte { return binary.BigEndian.AppendUint16(nil, v) }
func u32(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }
func u64(v uint64) []byte { return binary.BigEndian.AppendUint64(nil, v) }

func join(parts ...[]byte) (all []byte) {
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

func text(s string) []byte { return append(u32(uint32(len(s))), s...) }

func infoData(name string, infos ...uint16) []byte {
	p := append(text(name), u16(uint16(len(infos)))...)
	for _, i := range infos {
		p = append(p, u16(i)...)
	}
	return p
}

func metaData(name string, queries ...string) []byte {
	p := append(text(name), u32(uint32(len(queries)))...)
	for _, q := range queries {
		p = append(p, text(q)...)
	}
	return p
}

// wait gives the next call its own time: on a slow machine, a test may take minutes.
func (c *client) wait() {
	c.t.Helper()
	require.NoError(c.t, c.SetDeadline(time.Now().Add(testtool.Timeout)))
}

func (c *client) send(parts ...[]byte) {
	c.t.Helper()
	c.wait()
	require.NoError(c.t, testtool.Err(c.Write(join(parts...))))
}

func (c *client) read(n int) []byte {
	c.t.Helper()
	p := make([]byte, n)
	c.wait()
	require.NoError(c.t, testtool.Err(io.ReadFull(c.in, p)))
	return p
}

// ended waits until the server has closed the connection, without another byte.
func (c *client) ended() {
	c.t.Helper()
	rest, err := io.ReadAll(c.in)
	require.Empty(c.t, rest)
	var timeout net.Error
	if err != nil { // a reset, if the server has not read all
		require.False(c.t, asTimeout(err, &timeout), "the connection lives")
	}
}

func optionBytes(number uint32, data []byte) []byte {
	return join(u64(magicOption), u32(number), u32(uint32(len(data))), data)
}

// option sends an option, and returns its answers up to the last one.
func (c *client) option(number uint32, data []byte) []optionReply {
	c.t.Helper()
	c.send(optionBytes(number, data))
	return c.replies(number)
}

func (c *client) replies(number uint32) (all []optionReply) {
	c.t.Helper()
	for {
		head := c.read(20)
		require.Equal(c.t, uint64(magicReply), binary.BigEndian.Uint64(head))
		require.Equal(c.t, number, binary.BigEndian.Uint32(head[8:]))
		r := optionReply{kind: binary.BigEndian.Uint32(head[12:])}
		r.data = c.read(int(binary.BigEndian.Uint32(head[16:])))
		all = append(all, r)
		if r.kind == repAck || r.kind&repErr != 0 {
			return all
		}
	}
}

func (c *client) request(command, flags uint16, off, length uint64, payload []byte) []byte {
	c.cookie++
	if !c.extended {
		return join(u32(magicRequest), u16(flags), u16(command), u64(c.cookie), u64(off),
			u32(uint32(length)), payload)
	}
	if payload != nil {
		length = uint64(len(payload))
		if !c.bare || command != cmdWrite {
			flags |= cmdFlagPayloadLen
		}
	}
	return join(u32(magicExtRequest), u16(flags), u16(command), u64(c.cookie), u64(off),
		u64(length), payload)
}

// do sends a request and returns what comes for it.
func (c *client) do(command, flags uint16, off, length uint64, payload []byte) answered {
	c.t.Helper()
	c.send(c.request(command, flags, off, length, payload))
	cookie, a := c.answer(func(uint64) (uint16, uint64) { return command, length })
	require.Equal(c.t, c.cookie, cookie)
	return a
}

// answer takes all chunks of the next answer. They must not be mixed with others.
func (c *client) answer(of func(cookie uint64) (command uint16, length uint64)) (cookie uint64,
	a answered) {
	c.t.Helper()
	a.data, a.holes = map[uint64][]byte{}, map[uint64]uint64{}
	a.status = map[uint32][]extent{}
	for first := true; ; first = false {
		head := c.read(8)
		magic := binary.BigEndian.Uint32(head)
		if magic == magicSimple {
			require.True(c.t, first && !c.extended)
			cookie, a.code = binary.BigEndian.Uint64(c.read(8)), binary.BigEndian.Uint32(head[4:])
			command, length := of(cookie)
			require.False(c.t, c.structured && command == cmdRead)
			if command == cmdRead && a.code == 0 {
				a.data[0] = c.read(int(length))
			}
			return cookie, a
		}
		require.True(c.t, c.structured)
		require.Equal(c.t, c.extended, magic == magicExtReply)
		got := binary.BigEndian.Uint64(c.read(8))
		require.True(c.t, first || got == cookie, "chunks of two answers")
		cookie = got
		n := 0
		if c.extended {
			c.read(8) // the offset of the request
			n = int(binary.BigEndian.Uint64(c.read(8)))
		} else {
			require.Equal(c.t, uint32(magicStructured), magic)
			n = int(binary.BigEndian.Uint32(c.read(4)))
		}
		kind := binary.BigEndian.Uint16(head[6:])
		a.chunks = append(a.chunks, kind)
		c.chunk(&a, kind, c.read(n))
		if binary.BigEndian.Uint16(head[4:])&replyFlagDone != 0 {
			return cookie, a
		}
	}
}

func (c *client) chunk(a *answered, kind uint16, p []byte) {
	c.t.Helper()
	switch kind {
	case chunkNone:
		require.Empty(c.t, p)
	case chunkData:
		require.Greater(c.t, len(p), 8)
		a.data[binary.BigEndian.Uint64(p)] = p[8:]
	case chunkHole:
		require.Len(c.t, p, 12)
		a.holes[binary.BigEndian.Uint64(p)] = uint64(binary.BigEndian.Uint32(p[8:]))
	case chunkStatus:
		id := binary.BigEndian.Uint32(p)
		for p = p[4:]; len(p) > 0; p = p[8:] {
			a.status[id] = append(a.status[id], extent{uint64(binary.BigEndian.Uint32(p)),
				binary.BigEndian.Uint32(p[4:])})
		}
	case chunkStatusExt:
		id := binary.BigEndian.Uint32(p)
		require.Len(c.t, p, 8+16*int(binary.BigEndian.Uint32(p[4:])))
		for p = p[8:]; len(p) > 0; p = p[16:] {
			a.status[id] = append(a.status[id], extent{binary.BigEndian.Uint64(p),
				uint32(binary.BigEndian.Uint64(p[8:]))})
		}
	case chunkError, chunkErrorOffset:
		a.code = binary.BigEndian.Uint32(p)
		n := int(binary.BigEndian.Uint16(p[4:]))
		a.text = string(p[6 : 6+n])
		if p = p[6+n:]; kind == chunkErrorOffset {
			require.Len(c.t, p, 8)
			a.off = binary.BigEndian.Uint64(p)
		} else {
			require.Empty(c.t, p)
		}
	default:
		c.t.Fatalf("chunk of unknown kind %d", kind)
	}
}

// content puts the parts of a read together, and requires that they cover it once.
func (c *client) content(a answered, off, length uint64) []byte {
	c.t.Helper()
	require.Zero(c.t, a.code, "%s", a.text)
	if !c.structured {
		return a.data[0]
	}
	got, sum := make([]byte, length), uint64(0)
	for at, p := range a.data {
		sum += uint64(copy(got[at-off:], p))
	}
	for at, n := range a.holes {
		require.LessOrEqual(c.t, at-off+n, length)
		sum += n
	}
	require.Equal(c.t, length, sum)
	return got
}

// readAt, writeAt: requests that must succeed.
func (c *client) readAt(off, length uint64) []byte {
	c.t.Helper()
	return c.content(c.do(cmdRead, 0, off, length, nil), off, length)
}

func (c *client) writeAt(off uint64, p []byte) {
	c.t.Helper()
	c.good(c.do(cmdWrite, 0, off, uint64(len(p)), p))
}

func (c *client) good(a answered) {
	c.t.Helper()
	require.Zero(c.t, a.code, "%s", a.text)
}

// alive shows that the connection still works.
func (c *client) alive() {
	c.t.Helper()
	c.good(c.do(cmdFlush, 0, 0, 0, nil))
}
