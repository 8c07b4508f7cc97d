package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"
)

const (
	// loginTimeout is how long a target may take until a session is ready.
	loginTimeout = 30 * time.Second
	// silence is how long a target may be silent during a load, besides the load's own time. After
	// that it counts as hanging.
	silence = 30 * time.Second
)

// session is a session after its login. The load generator has its own login: the tests' initiator
// refuses targets that violate the standard, and those are measured, too.
type session struct {
	nc       net.Conn
	digests  bool
	maxSend  int  // the target's MaxRecvDataSegmentLength
	first    int  // FirstBurstLength
	instant  bool // ImmediateData
	cmdSN    uint32
	expStat  uint32
	maxCmdSN uint32
}

// logIn logs in without authentication, directly in the operational stage (RFC 7143 6.3).
func logIn(address, target string, n int, digests bool) (*session, error) {
	nc, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	if err := nc.SetDeadline(time.Now().Add(loginTimeout)); err != nil {
		return nil, errors.Join(err, nc.Close())
	}
	s := &session{nc: nc, digests: digests, maxSend: 8192, first: 65536, instant: true, cmdSN: 1}
	if err := s.negotiate(target, n); err != nil {
		return nil, errors.Join(fmt.Errorf("log in to %s: %w", target, err), nc.Close())
	}
	return s, nil
}

func (s *session) negotiate(target string, n int) error {
	digest := "None"
	if s.digests {
		digest = "CRC32C"
	}
	keys := strings.Join([]string{
		"InitiatorName=iqn.2026-01.test.example:bench-" + strconv.Itoa(n), "SessionType=Normal",
		"TargetName=" + target,
		"HeaderDigest=" + digest, "DataDigest=" + digest, "MaxRecvDataSegmentLength=262144",
		"InitialR2T=No", "ImmediateData=Yes",
		"MaxBurstLength=262144", "FirstBurstLength=262144", "MaxOutstandingR2T=1",
		"MaxConnections=1", "ErrorRecoveryLevel=0",
		"DefaultTime2Wait=2", "DefaultTime2Retain=0", "DataPDUInOrder=Yes",
		"DataSequenceInOrder=Yes", "",
	}, "\x00")
	for range 8 {
		var h [headerLen]byte
		// immediate Login Request; T, operational stage to full feature phase
		h[0], h[1] = 0x43, 0x87
		putLength(&h, len(keys))
		h[8], h[9], h[10] = 0x80, byte(n>>8), byte(n) // ISID
		binary.BigEndian.PutUint32(h[24:], s.cmdSN)
		binary.BigEndian.PutUint32(h[28:], s.expStat)
		if _, err := s.nc.Write(append(append(h[:], keys...),
			make([]byte, -len(keys)&3)...)); err != nil {
			return err
		}
		answer, data, err := s.read(false)
		if err != nil {
			return err
		}
		if answer[36] != 0 {
			return fmt.Errorf("refused with status %02x%02x", answer[36], answer[37])
		}
		if err := s.take(string(data)); err != nil {
			return err
		}
		if answer[1]&0x83 == 0x83 {
			return nil
		}
		keys = ""
	}
	return errors.New("the target does not leave the login phase")
}

// take parses the target's answers that matter.
func (s *session) take(text string) error {
	for pair := range strings.SplitSeq(text, "\x00") {
		key, value, _ := strings.Cut(pair, "=")
		number, _ := strconv.Atoi(value)
		switch key {
		case "MaxRecvDataSegmentLength":
			s.maxSend = number
		case "FirstBurstLength":
			s.first = number
		case "ImmediateData":
			s.instant = value == "Yes"
		case "HeaderDigest", "DataDigest":
			if (value == "CRC32C") != s.digests {
				return fmt.Errorf("the target chose %s", pair)
			}
		}
	}
	return nil
}

// read receives one PDU and keeps its sequence numbers.
func (s *session) read(digests bool) (h [headerLen]byte, data []byte, err error) {
	if _, err := io.ReadFull(s.nc, h[:]); err != nil {
		return h, nil, err
	}
	n, extra := int(h[5])<<16|int(h[6])<<8|int(h[7]), 0
	data = make([]byte, (n+3)&^3)
	if digests {
		extra = 4
		if n > 0 {
			extra = 8
		}
	}
	rest := make([]byte, len(data)+extra)
	if _, err := io.ReadFull(s.nc, rest); err != nil {
		return h, nil, err
	}
	copy(data, rest[min(extra, 4):])
	s.expStat = binary.BigEndian.Uint32(h[24:]) + 1
	s.maxCmdSN = binary.BigEndian.Uint32(h[32:])
	return h, data[:n], nil
}

// ready sends TEST UNIT READY until the LUN reports no unit attention.
func (s *session) ready(lun int) error {
	for range 8 {
		var h [headerLen]byte
		h[0], h[1] = opCommand, 0x80
		binary.BigEndian.PutUint16(h[8:], uint16(lun))
		binary.BigEndian.PutUint32(h[24:], s.cmdSN)
		binary.BigEndian.PutUint32(h[28:], s.expStat)
		s.cmdSN++
		pdu := h[:]
		if s.digests {
			pdu = sealed(pdu)
		}
		if _, err := s.nc.Write(pdu); err != nil {
			return err
		}
		answer, _, err := s.read(s.digests)
		switch {
		case err != nil:
			return err
		case answer[0] != opResponse:
			return fmt.Errorf("LUN %d: TEST UNIT READY is answered with opcode %#x", lun, answer[0])
		case answer[3] == 0:
			return nil
		}
	}
	return fmt.Errorf("LUN %d does not get ready", lun)
}
