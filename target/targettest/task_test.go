package targettest

import (
	"bytes"
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/target/internal/pdu"
)

// fake returns a session in full feature phase with a fake target, which answers each request as
// the test says.
func fake(t *testing.T, p Params, answer func(p *PDU) []byte) *Session {
	t.Helper()
	c, peer := pair(t)
	go func() {
		for {
			got, err := readPDU(peer)
			if err != nil {
				return
			}
			if _, err := peer.Write(answer(got)); err != nil {
				return
			}
		}
	}()
	c.CmdSN, c.MaxCmdSN = 1, fakeMax
	return &Session{Conn: c, Params: p, AnswerPings: true}
}

func readPDU(r net.Conn) (*PDU, error) {
	p := new(PDU)
	if _, err := io.ReadFull(r, p.Header[:]); err != nil {
		return nil, err
	}
	p.AHS = make([]byte, p.Header.AHSLen())
	p.Data = make([]byte, p.Header.PaddedDataLen())
	if _, err := io.ReadFull(r, p.AHS); err != nil {
		return nil, err
	}
	if _, err := io.ReadFull(r, p.Data); err != nil {
		return nil, err
	}
	p.Data = p.Data[:p.Header.DataLen()]
	return p, nil
}

// fakeExp and fakeMax are the command window in every PDU of a fake.
const fakeExp, fakeMax = 2, 100

func response(tag, expDataSN uint32, sense []byte) []byte {
	r := &pdu.SCSIResponse{TaskTag: tag, ExpCmdSN: fakeExp, MaxCmdSN: fakeMax, ExpDataSN: expDataSN}
	if sense != nil {
		r.Status = StatusCheckCondition
		sense = append([]byte{0, byte(len(sense))}, sense...)
	}
	return bytesOf(r, sense)
}

var fakeParams = Params{MaxSend: 1024, MaxReceive: 1024, MaxBurst: 2048, FirstBurst: 1536,
	MaxOutstandingR2T: 1, ImmediateData: true}

func TestWriteHonoursTheNegotiation(t *testing.T) {
	data := make([]byte, 4096)
	for i := range data {
		data[i] = byte(i / 256)
	}
	for name, tt := range map[string]struct {
		change func(*Params)
		parts  []int // lengths of immediate and unsolicited data
	}{
		"immediate and unsolicited": {func(*Params) {}, []int{1024, 512}},
		"immediate only":            {func(p *Params) { p.InitialR2T = true }, []int{1024}},
		"unsolicited only": {func(p *Params) { p.ImmediateData = false },
			[]int{0, 1024, 512}},
		"solicited only": {func(p *Params) {
			p.ImmediateData, p.InitialR2T = false, true
		}, []int{0}},
	} {
		t.Run(name, func(t *testing.T) {
			params := fakeParams
			tt.change(&params)
			var got []byte
			var unasked []int
			r2ts := uint32(0)
			s := fake(t, params, func(p *PDU) []byte {
				got = append(got, p.Data...)
				final := p.Header.Final()
				if r2ts == 0 {
					unasked = append(unasked, len(p.Data))
				}
				if !final {
					return nil
				}
				if len(got) == len(data) {
					return response(p.Header.TaskTag(), 0, nil)
				}
				r := &pdu.R2T{TaskTag: p.Header.TaskTag(), LUN: LUN(1), TransferTag: r2ts,
					ExpCmdSN: fakeExp, MaxCmdSN: fakeMax, R2TSN: r2ts,
					BufferOffset:  uint32(len(got)),
					DesiredLength: uint32(min(len(data)-len(got), 2048))}
				r2ts++
				return bytesOf(r, nil)
			})
			r := s.MustGood(t, Write10(1, 0, data))
			require.Equal(t, tt.parts, unasked)
			require.True(t, bytes.Equal(data, got))
			require.Len(t, r.R2Ts, int(r2ts))
		})
	}
}

func TestTaskChecksTheTarget(t *testing.T) {
	in := func(tag, sn, offset uint32, n int, final bool) []byte {
		return bytesOf(&pdu.DataIn{Final: final, TaskTag: tag, TransferTag: pdu.ReservedTag,
			ExpCmdSN: fakeExp, MaxCmdSN: fakeMax, DataSN: sn,
			BufferOffset: offset}, make([]byte, n))
	}
	r2t := func(tag, sn, offset, n uint32) []byte {
		return bytesOf(&pdu.R2T{LUN: LUN(1), TaskTag: tag, ExpCmdSN: fakeExp, MaxCmdSN: fakeMax,
			R2TSN: sn, BufferOffset: offset, DesiredLength: n}, nil)
	}
	for name, tt := range map[string]struct {
		write  bool
		answer func(tag uint32) []byte
		want   string
	}{
		"Data-In in order": {false, func(tag uint32) []byte {
			return append(append(in(tag, 0, 0, 1024, false), in(tag, 1, 1024, 1024, true)...),
				response(tag, 2, nil)...)
		}, ""},
		"DataSN": {false, func(tag uint32) []byte { return in(tag, 1, 0, 512, true) },
			"DataSN 0"},
		"offset": {false, func(tag uint32) []byte { return in(tag, 0, 512, 512, true) },
			"offset 0"},
		"segment too long": {false, func(tag uint32) []byte { return in(tag, 0, 0, 1025, true) },
			"MaxRecvDataSegmentLength"},
		"burst too long": {false, func(tag uint32) []byte {
			return append(append(in(tag, 0, 0, 1024, false), in(tag, 1, 1024, 1024, false)...),
				in(tag, 2, 2048, 1024, true)...)
		}, "MaxBurstLength"},
		"too much": {false, func(tag uint32) []byte {
			b := append(in(tag, 0, 0, 1024, false), in(tag, 1, 1024, 1024, true)...)
			return append(append(b, in(tag, 2, 2048, 1024, true)...), in(tag, 3, 3072, 1, true)...)
		}, "expected length"},
		"no final bit": {false,
			func(tag uint32) []byte {
				return append(in(tag, 0, 0, 512, false), response(tag, 1, nil)...)
			}, "no F bit"},
		"ExpDataSN": {false,
			func(tag uint32) []byte {
				return append(in(tag, 0, 0, 512, true), response(tag, 0, nil)...)
			}, "ExpDataSN"},
		"ExpDataSN of a write": {true,
			func(tag uint32) []byte {
				return append(r2t(tag, 0, 1536, 512), response(tag, 1, nil)...)
			}, "ExpDataSN"},
		"R2T for a read": {false, func(tag uint32) []byte { return r2t(tag, 0, 0, 512) },
			"writes nothing"},
		"no sense": {false, func(tag uint32) []byte {
			return bytesOf(&pdu.SCSIResponse{TaskTag: tag, Status: StatusCheckCondition,
				ExpCmdSN: fakeExp, MaxCmdSN: fakeMax}, nil)
		}, "without sense"},
		"sense length": {false, func(tag uint32) []byte {
			return bytesOf(&pdu.SCSIResponse{TaskTag: tag, Status: StatusCheckCondition,
				ExpCmdSN: fakeExp, MaxCmdSN: fakeMax}, []byte{0, 9, 0x70})
		}, "sense length"},
		"Data-In for a write": {true, func(tag uint32) []byte { return in(tag, 0, 0, 512, true) },
			"reads nothing"},
		"R2TSN": {true, func(tag uint32) []byte { return r2t(tag, 1, 1536, 512) },
			"R2TSN 0"},
		"R2T too long": {true, func(tag uint32) []byte { return r2t(tag, 0, 0, 2049) },
			"MaxBurstLength"},
		"R2T too far": {true, func(tag uint32) []byte { return r2t(tag, 0, 2048, 1025) },
			"expected length"},
	} {
		t.Run(name, func(t *testing.T) {
			s := fake(t, fakeParams, func(p *PDU) []byte {
				if !p.Header.Final() {
					return nil
				}
				return tt.answer(p.Header.TaskTag())
			})
			c := Command{LUN: 1, CDB: make([]byte, 6), Read: 3072}
			if tt.write {
				c = Command{LUN: 1, CDB: make([]byte, 6), Write: make([]byte, 3072)}
			}
			_, err := s.Do(c)
			if tt.want == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, tt.want)
			}
		})
	}
}
