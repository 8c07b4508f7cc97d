package nbd

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

func FuzzRequest(f *testing.F) {
	f.Add(join(u32(magicRequest), make([]byte, 28)), false)
	f.Add(join(u32(magicExtRequest), u16(cmdFlagPayloadLen), make([]byte, 26)), true)
	f.Fuzz(func(t *testing.T, b []byte, extended bool) {
		if len(b) < extRequestLen {
			return
		}
		r, err := decodeRequest(b, extended)
		if err != nil {
			require.Equal(t, request{}, r)
			return
		}
		again := join(b[:4], u16(r.flags), u16(r.command), u64(r.cookie), u64(r.off))
		if extended {
			again = append(again, u64(r.length)...)
		} else {
			again = append(again, u32(uint32(r.length))...)
		}
		require.Equal(t, b[:len(again)], again)
		require.LessOrEqual(t, r.payload, r.length)
	})
}

func FuzzInfoRequest(f *testing.F) {
	f.Add(infoData("disk1.raw", 1, 2, 3))
	f.Add(infoData(""))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := decodeInfoRequest(b); err == nil {
			require.Equal(t, b, infoData(r.name, r.infos...))
		}
	})
}

func FuzzMetaRequest(f *testing.F) {
	f.Add(metaData("disk1.raw", "base:", "qemu:allocation-depth"))
	f.Add(append(text(""), 0xff, 0xff, 0xff, 0xff))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := decodeMetaRequest(b); err == nil {
			require.Equal(t, b, metaData(r.name, r.queries...))
		}
	})
}

func FuzzStatusPayload(f *testing.F) {
	f.Add(join(u64(4096), u32(1)))
	f.Fuzz(func(t *testing.T, b []byte) {
		length, contexts, err := decodeStatusPayload(b)
		if err != nil {
			return
		}
		again := u64(length)
		for _, id := range contexts {
			again = append(again, u32(id)...)
		}
		require.Equal(t, b, again)
	})
}

// FuzzConnection gives a server any bytes. It ends the connection, and has no memory in use then.
// The first byte chooses how far the negotiation has come before.
func FuzzConnection(f *testing.F) {
	c := &client{}
	requests := join(c.request(cmdWrite, 0, 512, 3, []byte("abc")),
		c.request(cmdRead, 0, 0, 9, nil),
		c.request(cmdBlockStatus, 0, 0, 1<<20, nil), c.request(cmdWriteZeroes, 2, 5, 1<<16, nil))
	f.Add(append([]byte{0}, join(u32(3), optionBytes(optList, nil),
		optionBytes(optSetMeta, metaData("", "base:allocation")), optionBytes(optGo, infoData("")),
		requests)...))
	f.Add(append([]byte{1}, requests...))
	f.Add(append([]byte{2}, requests...))
	c.extended = true
	f.Add(append([]byte{3}, join(c.request(cmdWrite, 0, 0, 3, []byte("abc")),
		c.request(cmdBlockStatus, 0, 0, 0, join(u64(4096), u32(1))),
		c.request(cmdCache, 0, 0, 1<<20, nil))...))
	c.bare = true
	f.Add(append([]byte{3}, c.request(cmdWrite, 0, 0, 3, []byte("abc"))...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) == 0 {
			return
		}
		sent := b[1:]
		if mode := int(b[0]) % 4; mode > 0 {
			before := u32(3)
			if mode > 1 {
				before = append(before, optionBytes([]uint32{optStructuredReply,
					optExtendedHeaders}[mode-2], nil)...)
				before = append(before, optionBytes(optSetMeta, metaData("", "base:allocation"))...)
			}
			sent = join(before, optionBytes(optGo, infoData("")), sent)
		}
		throughServer(t, sent)
	})
}

func throughServer(t *testing.T, sent []byte) {
	all := serving.New(serving.Config{})
	s := testtool.Must(New(Options{Disks: all, ReconnectDelay: -1}))(t)
	require.NoError(t, all.Add(serving.Options{Number: 1, Name: "d",
		Disk: disktest.NewMemory(1 << 20), Identity: disk.Identity{NAA: [8]byte{0x30}}}))
	ours, theirs := net.Pipe()
	s.conns.Take(theirs, func(nc net.Conn) *conn {
		return s.newConn(nc, &Portal{Name: "tcp:fuzz"})
	})
	received := make(chan []byte, 1)
	go func() {
		b, _ := io.ReadAll(ours)
		received <- b
	}()
	_ = ours.SetWriteDeadline(time.Now().Add(10 * time.Second))
	_, _ = io.Copy(ours, bytes.NewReader(sent))
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if len(sent) > 0 {
		time.Sleep(time.Millisecond) // the reader sees what came, and then the end
	}
	_ = ours.Close()
	require.NoError(t, s.Shutdown(ctx))
	require.Zero(t, all.Memory.Used())
	if got := <-received; len(got) >= 8 {
		require.Equal(t, uint64(magicInit), binary.BigEndian.Uint64(got))
	}
}
