package target_test

import (
	"encoding/binary"
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target"
	"kubevirt.io/disk/target/internal/pdu"
	tt "kubevirt.io/disk/target/targettest"
)

// pipeline is a session that sends several commands in one system call and reads all answers. It
// allocates nothing itself.
type pipeline struct {
	nc       net.Conn
	requests []byte
	each     int // bytes of one request
	cmdSN    uint32
	answers  []byte
}

const pipelineDepth = 32

func newPipeline(t testing.TB, write, digests bool, size int) *pipeline {
	opt := options{LUNs: []serving.Options{{Number: 1, Name: "bench",
		Disk: disktest.NewMemory(diskSize), Identity: identity(1),
		Access: serving.AccessWriteShared}}}
	srv := testtool.Must(opt.serve())(t)
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	served := testtool.Go(func() error { return srv.Serve(l) })
	t.Cleanup(func() {
		require.NoError(t, srv.Close())
		require.ErrorIs(t, <-served, target.ErrServerClosed)
	})
	nc := testtool.Must(net.Dial("tcp", l.Addr().String()))(t)
	t.Cleanup(func() { _ = nc.Close() })
	s, err := tt.NewConn(nc).Login(tt.LoginOptions{HeaderDigest: digests, DataDigest: digests,
		Keys: tt.KV("MaxRecvDataSegmentLength", "262144", "FirstBurstLength", "262144")})
	require.NoError(t, err)
	require.NoError(t, testtool.Err(s.ClearAttention(1)))
	p := &pipeline{nc: nc, cmdSN: s.CmdSN}
	for i := range pipelineDepth {
		cmd := pdu.SCSICommand{Final: true, Read: !write, Write: write, LUN: tt.LUN(1),
			TaskTag: uint32(1000 + i), ExpectedLength: uint32(size)}
		var data []byte
		c := tt.Read10(1, uint32(i*size/512), size/512)
		answer := pdu.HeaderLen
		if write {
			data = make([]byte, size)
			c = tt.Write10(1, uint32(i*size/512), data)
		} else {
			answer += size
		}
		if digests {
			answer += 8
			if write {
				answer -= 4
			}
		}
		copy(cmd.CDB[:], c.CDB)
		b := s.Bytes(&cmd, data)
		p.each = len(b)
		p.requests = append(p.requests, b...)
		p.answers = append(p.answers, make([]byte, answer)...)
	}
	return p
}

// run sends all commands once.
func (p *pipeline) run(digests bool) error {
	for at := 0; at < len(p.requests); at += p.each {
		h := p.requests[at:]
		binary.BigEndian.PutUint32(h[24:], p.cmdSN)
		p.cmdSN++
		if digests {
			pdu.PutDigest(h[pdu.HeaderLen:], pdu.Digest(h[:pdu.HeaderLen]))
		}
	}
	if _, err := p.nc.Write(p.requests); err != nil {
		return err
	}
	_, err := io.ReadFull(p.nc, p.answers)
	return err
}

var pipelineCases = []struct {
	name           string
	write, digests bool
	size           int
}{
	{"read 4 KiB", false, false, 4 << 10},
	{"write 4 KiB", true, false, 4 << 10},
	{"read 4 KiB, digests", false, true, 4 << 10},
	{"write 4 KiB, digests", true, true, 4 << 10},
	{"read 64 KiB", false, false, 64 << 10},
	{"write 64 KiB", true, false, 64 << 10},
}
