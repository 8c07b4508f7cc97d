package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"time"
)

// initiator is one session of the load generator. It costs less than any target, because it encodes
// its PDUs in advance and wire does the rest. RFC 7143 11.3 (SCSI Command), 11.7 (Data-In,
// Data-Out), 11.8 (R2T).
type initiator struct {
	*wire
	addresses
	p *session

	cmdSN, expStatSN, maxCmdSN uint32
	flying                     int
	free                       []uint32 // task tags without a command
	done                       uint64

	payload []byte // as much data as one PDU carries, with padding and digest
	direct  []byte // a large command with its data; only the header changes
}

const (
	headerLen = 48
	largeData = 32 << 10 // data from this size on is sent without a copy

	opCommand, opDataOut                                    = 0x01, 0x05
	opNOPIn, opResponse, opDataIn, opR2T, opAsync, opReject = 0x20, 0x21, 0x25, 0x31, 0x32, 0x3f
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// newInitiator logs in as the n-th initiator of a load.
func newInitiator(address, target string, n int, l generatorLoad,
	timeout time.Duration) (*initiator, error) {
	session, err := logIn(address, target, n, l.digests)
	if err != nil {
		return nil, err
	}
	defer session.nc.Close()
	for lun := range l.luns {
		if err := session.ready(lun + 1); err != nil {
			return nil, err
		}
	}
	w, err := newWire(session.nc, timeout)
	if err != nil {
		return nil, err
	}
	i := &initiator{wire: w, addresses: addresses{l: l, random: uint64(n)*0x9e3779b97f4a7c15 + 1},
		p: session, cmdSN: session.cmdSN, expStatSN: session.expStat, maxCmdSN: session.maxCmdSN}
	for tag := range l.depth {
		i.free = append(i.free, uint32(tag))
	}
	if l.write {
		i.payload = i.data(min(l.bytes, i.p.maxSend))
		if n := i.immediate(); n >= largeData {
			i.direct = append(make([]byte, headerLen+i.digestLen(), headerLen+n+16), i.data(n)...)
		}
	}
	return i, nil
}

func (i *initiator) digestLen() int {
	if i.l.digests {
		return 4
	}
	return 0
}

// data is a data segment of n bytes, a multiple of four, with its digest.
func (i *initiator) data(n int) []byte {
	b := make([]byte, n, n+4)
	for j := range b {
		b[j] = byte(j * 7)
	}
	if i.l.digests {
		b = sealed(b)
	}
	return b
}

// sealed appends the digest of b.
func sealed(b []byte) []byte {
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// immediate is how many bytes of a write travel with the command.
func (i *initiator) immediate() int {
	if !i.l.write || !i.p.instant {
		return 0
	}
	return min(i.l.bytes, i.p.maxSend, i.p.first)
}

// run keeps the load's number of commands in flight until stop returns true, and returns how many
// have ended.
func (i *initiator) run(stop func() bool) (uint64, error) {
	for {
		for (!stop() || i.done == 0 && i.flying == 0) && len(i.free) > 0 &&
			int32(i.maxCmdSN-i.cmdSN) >= 0 {
			if err := i.command(); err != nil {
				return 0, err
			}
		}
		if err := i.flush(); err != nil {
			return 0, err
		}
		if i.flying == 0 && i.skip == 0 { // the data of the last response has arrived, too
			if stop() {
				return i.done, nil
			}
			return 0, errors.New("the target's command window is closed, and no command is in " +
				"flight")
		}
		if err := i.receive(); err != nil {
			return 0, err
		}
	}
}

// command queues the next command, READ(16) or WRITE(16).
func (i *initiator) command() error {
	var h [headerLen]byte
	tag := i.free[len(i.free)-1]
	i.free = i.free[:len(i.free)-1]
	lun, offset := i.next()
	n := i.immediate()
	h[0], h[1] = opCommand, 0x80|0x40 // F, R
	h[32] = 0x88
	if i.l.write {
		h[1], h[32] = 0x80|0x20, 0x8a // F, W
	}
	putLength(&h, n)
	binary.BigEndian.PutUint16(h[8:], lun)
	binary.BigEndian.PutUint32(h[16:], tag)
	binary.BigEndian.PutUint32(h[20:], uint32(i.l.bytes))
	binary.BigEndian.PutUint32(h[24:], i.cmdSN)
	binary.BigEndian.PutUint32(h[28:], i.expStatSN)
	binary.BigEndian.PutUint64(h[34:], uint64(offset/512))
	binary.BigEndian.PutUint32(h[42:], uint32(i.l.bytes/512))
	i.cmdSN++
	i.flying++
	if i.direct == nil {
		i.header(&h)
		if n > 0 {
			i.out = append(i.out, i.payload...)
		}
		return nil
	}
	if err := i.flush(); err != nil {
		return err
	}
	i.header(&h)
	copy(i.direct, i.out)
	i.out = i.out[:0]
	return i.write(i.direct)
}

func putLength(h *[headerLen]byte, n int) { h[5], h[6], h[7] = byte(n>>16), byte(n>>8), byte(n) }

func (i *initiator) header(h *[headerLen]byte) {
	i.out = append(i.out, h[:]...)
	if i.l.digests {
		i.out = binary.LittleEndian.AppendUint32(i.out, crc32.Checksum(h[:], castagnoli))
	}
}

// dataOut answers an R2T.
func (i *initiator) dataOut(r2t []byte) error {
	tag, ttag := binary.BigEndian.Uint32(r2t[16:]), binary.BigEndian.Uint32(r2t[20:])
	offset, left := int(binary.BigEndian.Uint32(r2t[40:])), int(binary.BigEndian.Uint32(r2t[44:]))
	for sn := uint32(0); left > 0; sn++ {
		n := min(left, i.p.maxSend, i.l.bytes)
		var h [headerLen]byte
		h[0] = opDataOut
		if n == left {
			h[1] = 0x80
		}
		putLength(&h, n)
		copy(h[8:16], r2t[8:16])
		binary.BigEndian.PutUint32(h[16:], tag)
		binary.BigEndian.PutUint32(h[20:], ttag)
		binary.BigEndian.PutUint32(h[28:], i.expStatSN)
		binary.BigEndian.PutUint32(h[36:], sn)
		binary.BigEndian.PutUint32(h[40:], uint32(offset))
		i.header(&h)
		if n+i.digestLen() == len(i.payload) {
			i.out = append(i.out, i.payload...)
		} else {
			i.out = append(i.out, i.data(n)...)
		}
		if len(i.out) > inBuffer {
			if err := i.flush(); err != nil {
				return err
			}
		}
		offset, left = offset+n, left-n
	}
	return nil
}

func (i *initiator) receive() error {
	return i.wire.receive(headerLen+i.digestLen(), func(h []byte) (drop int, err error) {
		if data := int(h[5])<<16 | int(h[6])<<8 | int(h[7]); data > 0 {
			drop = (data+3)&^3 + i.digestLen()
		}
		return drop, i.handle(h)
	})
}

func (i *initiator) handle(h []byte) error {
	switch op := h[0] & 0x3f; op {
	case opDataIn:
		if h[1]&1 == 0 {
			return nil // no status yet
		}
	case opResponse:
	case opR2T:
		return i.dataOut(h)
	case opNOPIn, opAsync:
		return nil // runs are shorter than any target's timeout
	default:
		return fmt.Errorf("the target sent a PDU of opcode %#x", op)
	}
	if h[3] != 0 {
		return fmt.Errorf("a command ended with status %#x", h[3])
	}
	i.expStatSN = binary.BigEndian.Uint32(h[24:]) + 1
	i.maxCmdSN = binary.BigEndian.Uint32(h[32:])
	i.free = append(i.free, binary.BigEndian.Uint32(h[16:]))
	i.flying--
	i.done++
	return nil
}
