package target_test

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target"
	"kubevirt.io/disk/target/internal/pdu"
	tt "kubevirt.io/disk/target/targettest"
)

// pipes is a listener for connections in memory.
type pipes struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), done: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.done) })
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Net: "pipe", Name: "pipe"} }

// dial returns the initiator's end of a new connection.
func (p *pipes) dial() net.Conn {
	ours, theirs := net.Pipe()
	p.conns <- theirs
	return ours
}

// How a fuzzed connection begins, by the low bits of the first byte of the input.
const (
	fuzzRaw    = iota // only the input is sent
	fuzzNormal        // after a login
	// after a login with both digests; the input gets correct digests
	fuzzDigests
	fuzzDiscovery // after a login to a discovery session
	fuzzModes
)

// FuzzConnection sends whole connections. Whatever it sends, nothing panics, no memory, session or
// connection is left behind, and another session goes on.
func FuzzConnection(f *testing.F) {
	for mode := range byte(fuzzModes) {
		f.Add([]byte{mode})
		for _, dialog := range dialogs() {
			f.Add(append([]byte{mode}, dialog...))
		}
	}
	f.Add(append([]byte{fuzzRaw}, loginBytes()...))
	// The memory is small, so that some commands end for lack of it.
	seen := new(events)
	opt := options{
		Options: target.Options{Limits: target.Limits{CommandWindow: 16,
			LoginDelay: time.Millisecond}}, // most inputs fail
		Shared: serving.Config{Memory: 2 << 20, Observer: seen},
		LUNs: []serving.Options{
			{Number: 1, Name: "fuzz", Disk: disktest.NewMemory(1 << 20), Identity: identity(1),
				Access: serving.AccessWriteShared},
			{Number: 2, Name: "still", Disk: disktest.NewMemory(1 << 20), Identity: identity(2),
				Access: serving.AccessWriteShared},
		}}
	srv := testtool.Must(opt.serve())(f)
	l := newPipes()
	served := testtool.Go(func() error { return srv.Serve(l) })
	f.Cleanup(func() {
		require.NoError(f, srv.Close())
		require.ErrorIs(f, <-served, target.ErrServerClosed)
	})
	login := func(t *testing.T, o tt.LoginOptions) (*tt.Session, net.Conn) {
		nc := l.dial()
		return testtool.Must(tt.NewConn(nc).Login(o))(t), nc
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		if len(input) == 0 || len(input) > 64<<10 {
			return
		}
		var nc net.Conn
		body := input[1:]
		switch input[0] % fuzzModes {
		case fuzzRaw:
			nc = l.dial()
		case fuzzNormal:
			_, nc = login(t, tt.LoginOptions{})
		case fuzzDigests:
			var s *tt.Session
			s, nc = login(t, tt.LoginOptions{HeaderDigest: true, DataDigest: true})
			body = withDigests(s.Conn, body)
		case fuzzDiscovery:
			_, nc = login(t, tt.LoginOptions{Discovery: true})
		}
		drained := make(chan struct{})
		go func() {
			defer close(drained)
			_, _ = io.Copy(io.Discard, nc)
		}()
		_ = nc.SetWriteDeadline(time.Now().Add(30 * time.Second))
		_, _ = nc.Write(body)
		_ = nc.Close()
		<-drained
		testtool.Eventually(t, func() bool {
			all, _ := srv.Connections()
			return all == 0 && len(srv.Sessions()) == 0 && srv.MemoryInUse() == 0
		}, "the connection ends and leaves nothing")
		require.Zero(t, seen.count("panic"))
		s, other := login(t, tt.LoginOptions{Initiator: "iqn.2026-01.test:bystander"})
		require.NoError(t, testtool.Err(s.ClearAttention(2)))
		// a session of the fuzzer may have reserved it by now
		require.NoError(t, testtool.Err(s.Do(tt.Read10(2, 0, 1))))
		require.NoError(t, other.Close())
		testtool.Eventually(t,
			func() bool { all, _ := srv.Connections(); return all == 0 }, "the bystander ends")
	})
}

// withDigests splits the input into PDUs like the target, and adds the digests to each.
func withDigests(c *tt.Conn, b []byte) (out []byte) {
	for len(b) >= pdu.HeaderLen {
		h := pdu.Header(b[:pdu.HeaderLen])
		b = b[pdu.HeaderLen:]
		ahs := b[:min(len(b), h.AHSLen())]
		b = b[len(ahs):]
		data := b[:min(len(b), h.PaddedDataLen())]
		b = b[len(data):]
		out = append(append(out, h[:]...), ahs...)
		out = pdu.AppendDigest(out, pdu.Digest(h[:], ahs))
		out = append(out, data...)
		if len(data) > 0 {
			out = pdu.AppendDigest(out, pdu.Digest(data))
		}
	}
	return append(out, b...)
}

// loginBytes returns the first request of a login.
func loginBytes() []byte {
	c := tt.NewConn(nil)
	return c.Bytes(&pdu.LoginRequest{Transit: true, CSG: 1, NSG: 3, CmdSN: 1},
		tt.KV("InitiatorName", "iqn.2026-01.test:a",
			"SessionType", "Normal", "TargetName", target.DefaultTargetName, "HeaderDigest",
			"CRC32C,None").Text())
}

// dialogs returns the fuzzer's first inputs: one PDU of each kind, and commands with their data.
func dialogs() [][]byte {
	c := tt.NewConn(nil)
	lun := uint64(1) << 48
	command := func(sn, length uint32, read, write bool, cdb ...byte) *pdu.SCSICommand {
		p := &pdu.SCSICommand{Final: true, Read: read, Write: write, TaskTag: sn + 100, LUN: lun,
			CmdSN: sn, ExpectedLength: length}
		copy(p.CDB[:], cdb)
		return p
	}
	read := func(sn uint32) []byte {
		return c.Bytes(command(sn, 4096, true, false, 0x28, 0, 0, 0, 0, 0, 0, 0, 8), nil)
	}
	write := c.Bytes(command(3, 1024, false, true, 0x2a, 0, 0, 0, 0, 0, 0, 0, 2),
		make([]byte, 1024))
	solicited := c.Bytes(command(3, 4096, false, true, 0x2a, 0, 0, 0, 0, 0, 0, 0, 8), nil)
	dataOut := c.Bytes(&pdu.DataOut{Final: true, LUN: lun, TaskTag: 103, TransferTag: 1},
		make([]byte, 4096))
	list := c.Bytes(command(3, 24, false, true, 0x42, 0, 0, 0, 0, 0, 0, 0, 24),
		[]byte{1: 22, 3: 16, 19: 8, 23: 0})
	abort := c.Bytes(&pdu.TaskManagementRequest{Immediate: true, Function: pdu.TMAbortTask,
		LUN: lun, TaskTag: 9, RefTaskTag: 103, RefCmdSN: 3, CmdSN: 4}, nil)
	reset := c.Bytes(&pdu.TaskManagementRequest{Immediate: true, Function: pdu.TMLogicalUnitReset,
		LUN: lun, TaskTag: 9, RefTaskTag: pdu.ReservedTag, CmdSN: 4}, nil)
	ping := c.Bytes(&pdu.NOPOut{Immediate: true, TaskTag: 8, TransferTag: pdu.ReservedTag,
		CmdSN: 2}, []byte("ping"))
	text := c.Bytes(&pdu.TextRequest{Final: true, TaskTag: 7, TransferTag: pdu.ReservedTag,
		CmdSN: 2}, tt.KV("SendTargets", "All").Text())
	logout := c.Bytes(&pdu.LogoutRequest{Immediate: true, TaskTag: 6, CmdSN: 2}, nil)
	tur := c.Bytes(command(2, 0, false, false, 0), nil)
	join := func(parts ...[]byte) (all []byte) {
		for _, p := range parts {
			all = append(all, p...)
		}
		return all
	}
	return [][]byte{
		join(tur, read(3), read(4)), join(tur, write), join(tur, solicited, dataOut),
		join(tur, solicited, abort, dataOut), join(tur, solicited, reset),
		// the last two arrive ahead of their turn
		join(tur, list), ping, text, logout, join(read(4), read(3), tur),
		c.Bytes(command(2, 4096, true, false, 0x88, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8), nil,
			tt.WithAHS([]byte{0, 5, 2, 0, 0, 0, 4, 0})),
	}
}
