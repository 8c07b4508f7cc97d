package nbd

import (
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// pipeline is a connection that sends several requests in one system call and takes all answers. It
// allocates nothing itself.
type pipeline struct {
	*client
	requests, answers []byte
}

const pipelineDepth = 32

var pipelineCases = []struct {
	name    string
	mode    int
	command uint16
	flags   uint16
	size    int
}{
	{"read 4 KiB", structured, cmdRead, 0, 4 << 10},
	{"write 4 KiB", structured, cmdWrite, 0, 4 << 10},
	{"write 4 KiB, FUA, extended", extended, cmdWrite, cmdFlagFUA, 4 << 10},
	{"write 4 KiB, no sectors", structured, cmdWrite, 0, 4<<10 - 3},
	{"read 64 KiB", structured, cmdRead, 0, 64 << 10},
	{"read 256 KiB, compact", compact, cmdRead, 0, 256 << 10},
	{"write 64 KiB", extended, cmdWrite, 0, 64 << 10},
	{"zero", extended, cmdWriteZeroes, 0, 4 << 10},
	{"trim", structured, cmdTrim, 0, 4 << 10},
}

// newPipeline serves a full disk, so that reads are one chunk.
func newPipeline(t testing.TB, mode int, command, flags uint16, size int) *pipeline {
	return fullServer(t).pipeline(t, mode, command, flags, size)
}

func fullServer(t testing.TB) *served {
	full := disktest.NewMemory(diskSize)
	require.NoError(t, testtool.Err(full.WriteAt(t.Context(), make([]byte, diskSize), 0)))
	return serve(t, 1, func(o *serving.Options) {
		o.Disk, o.Access = full, serving.AccessWriteShared
	})
}

func (v *served) pipeline(t testing.TB, mode int, command, flags uint16, size int) *pipeline {
	p := &pipeline{client: v.open(t, "", mode)}
	answer := 16
	switch {
	case mode == extended:
		answer = 32
	case mode == structured && command == cmdRead:
		answer = 20
	}
	if command == cmdRead {
		if answer += size; mode != compact {
			answer += 8
		}
	}
	for i := range uint64(pipelineDepth) {
		var data []byte
		if command == cmdWrite {
			data = make([]byte, size)
		}
		p.requests = append(p.requests, p.request(command, flags, i*uint64(size)/512*512,
			uint64(size), data)...)
		p.answers = append(p.answers, make([]byte, answer)...)
	}
	return p
}

func (p *pipeline) run() error {
	if _, err := p.Write(p.requests); err != nil {
		return err
	}
	_, err := io.ReadFull(p.Conn, p.answers)
	return err
}
