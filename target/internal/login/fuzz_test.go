package login

import (
	"bytes"
	"encoding/binary"
	"testing"
)

// encode turns requests into a fuzz input: flags, length, data.
func encode(reqs ...Request) []byte {
	var b []byte
	for _, r := range reqs {
		flags := byte(r.CSG)<<2 | byte(r.NSG)
		if r.Transit {
			flags |= 0x80
		}
		if r.Continue {
			flags |= 0x40
		}
		b = append(b, flags, r.VersionMin)
		b = binary.BigEndian.AppendUint16(b, uint16(len(r.Data)))
		b = append(b, r.Data...)
	}
	return b
}

func decode(b []byte) (reqs []Request) {
	for len(b) >= 4 {
		n := min(int(binary.BigEndian.Uint16(b[2:])), len(b)-4)
		reqs = append(reqs, Request{CSG: Stage(b[0] >> 2 & 3), NSG: Stage(b[0] & 3),
			Transit:  b[0]&0x80 != 0,
			Continue: b[0]&0x40 != 0, VersionMin: b[1], Data: b[4 : 4+n]})
		b = b[4+n:]
	}
	return reqs
}

// FuzzMachine feeds anything to a machine. With authentication the fuzzer cannot guess the right
// response, so the machine must never be done.
func FuzzMachine(f *testing.F) {
	f.Add(true, encode(Request{NSG: 1, Transit: true, Data: normal("AuthMethod=CHAP,None")},
		Request{Data: text("CHAP_A=5,7")},
		Request{NSG: 3, Transit: true,
			Data: text("CHAP_N="+user, "CHAP_R=0x00112233445566778899aabbccddeeff", "CHAP_I=1",
				"CHAP_C=0x00")}))
	f.Add(true, encode(Request{Data: normal()}, Request{Data: text("AuthMethod=CHAP", "CHAP_A=6")}))
	f.Add(true, encode(Request{CSG: 1, NSG: 3, Transit: true,
		Data: normal("HeaderDigest=CRC32C,None")}))
	f.Add(false, encode(Request{NSG: 1, Transit: true, Data: normal("AuthMethod=None")},
		Request{CSG: 1, NSG: 3, Transit: true,
			Data: text("MaxBurstLength=512", "FirstBurstLength=0x200", "InitialR2T=No",
				"HeaderDigest=CRC32C", "X-a=b")}))
	f.Add(false, encode(Request{CSG: 1, Continue: true, Data: discovery("Max")},
		Request{CSG: 1, NSG: 3, Transit: true, Data: []byte("Connections=1\x00")}))
	f.Add(false, encode(Request{VersionMin: 1, Data: []byte("=")}))
	required := chapConfig(f)
	f.Fuzz(func(t *testing.T, auth bool, input []byte) {
		cfg := openConfig()
		if auth {
			cfg = required
		}
		m := NewMachine(cfg)
		defer m.Close()
		over := false
		for _, req := range decode(input) {
			before := bytes.Clone(req.Data)
			resp := m.Step(&req)
			if !bytes.Equal(before, req.Data) {
				t.Fatal("the request was changed")
			}
			checkResponse(t, &req, &resp)
			if over && resp.Status == StatusSuccess {
				t.Fatal("a request succeeded after the end")
			}
			over = over || resp.Status != StatusSuccess || m.Done()
		}
		if m.Done() {
			if auth {
				t.Fatal("logged in without the secret")
			}
			checkParams(t, m.Result())
		}
	})
}

func checkResponse(t *testing.T, req *Request, resp *Response) {
	switch {
	case len(resp.Data) > maxSegment:
		t.Fatalf("a segment of %d bytes", len(resp.Data))
	case (resp.Status == StatusSuccess) != (resp.Err == nil) || (resp.Err == nil) !=
		(resp.Reason == ""):
		t.Fatalf("the response contradicts itself: %+v", resp)
	case resp.Status != StatusSuccess && (resp.Transit || resp.Continue || len(resp.Data) > 0):
		t.Fatalf("a refusal with more than a status: %+v", resp)
	case resp.Transit && (!req.Transit || resp.Continue || resp.NSG > req.NSG ||
		resp.NSG <= req.CSG):
		t.Fatalf("transition %+v of request %+v", resp, req)
	case req.Continue && len(resp.Data) > 0:
		t.Fatal("text in the answer to a request that is not complete")
	case resp.Err != nil && len(resp.Err.Error()) > 500:
		t.Fatalf("a message of %d bytes", len(resp.Err.Error()))
	}
	if !resp.Continue {
		return
	}
	if len(resp.Data) != maxSegment {
		t.Fatal("a response is continued although it had room")
	}
}

func checkParams(t *testing.T, r Result) {
	p := r.Params
	switch {
	case r.InitiatorName == "" || len(r.InitiatorName) > maxNameLen || r.User != "":
		t.Fatalf("result %+v", r)
	case r.SessionType == Normal && r.TargetName != targetIQN:
		t.Fatalf("logged in to the wrong target %q", r.TargetName)
	case p.FirstBurstLength > p.MaxBurstLength || p.FirstBurstLength < minLength ||
		p.MaxBurstLength > maxLength,
		p.SendMaxDataSegment < minLength || p.SendMaxDataSegment > maxLength,
		p.ProtocolLevel > LevelRFC7144:
		t.Fatalf("parameters %+v", p)
	}
}
