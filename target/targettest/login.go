package targettest

import (
	"cmp"
	"fmt"
	"net"

	"kubevirt.io/disk/target/internal/pdu"
)

// The login stages (RFC 7143 11.12.3). 2 is reserved.
const (
	StageSecurity    uint8 = 0
	StageOperational uint8 = 1
	StageReserved    uint8 = 2
	StageFull        uint8 = 3
)

// LoginPDU is one Login Request.
type LoginPDU struct {
	CSG, NSG uint8
	Transit  bool
	Continue bool
	Keys     Keys
	Raw      []byte // the text, in place of Keys
	Header   func(*pdu.LoginRequest)
	Options  []Option
}

// LoginReply is one Login Response. If the target continued a text, it is the last one, with the
// whole text.
type LoginReply struct {
	pdu.LoginResponse
	Keys Keys
}

// Status returns class and detail as one number, as in the standard's tables.
func (r *LoginReply) Status() uint16 { return uint16(r.StatusClass)<<8 | uint16(r.StatusDetail) }

// LoginError says that the target refused a login.
type LoginError struct {
	Status uint16 // class and detail
}

func (e *LoginError) Error() string {
	return fmt.Sprintf("login refused with status %04x", e.Status)
}

// LoginID is what all Login Requests of one login have in common.
type LoginID struct {
	ISID [6]byte
	TSIH uint16
	CID  uint16
	Tag  uint32
}

// SendLogin sends one Login Request.
func (c *Conn) SendLogin(id LoginID, p LoginPDU) error {
	req := pdu.LoginRequest{Transit: p.Transit, Continue: p.Continue, CSG: p.CSG, NSG: p.NSG,
		ISID: id.ISID, TSIH: id.TSIH,
		TaskTag: id.Tag, CID: id.CID, CmdSN: c.CmdSN, ExpStatSN: c.ExpStatSN}
	if p.Header != nil {
		p.Header(&req)
	}
	text := p.Raw
	if text == nil {
		text = p.Keys.Text()
	}
	return c.Send(&req, text, p.Options...)
}

// LoginStep sends one Login Request and receives the answer, with all parts of a continued text. It
// checks the rules for every Login Response (RFC 7143 11.13). A refusal is not an error here: the
// reply shows it.
func (c *Conn) LoginStep(id LoginID, p LoginPDU) (*LoginReply, error) {
	if err := c.SendLogin(id, p); err != nil {
		return nil, err
	}
	var text []byte
	for {
		rsp, data, err := Expect[pdu.LoginResponse](c)
		if err != nil {
			return nil, err
		}
		text = append(text, data...)
		reply := &LoginReply{LoginResponse: rsp}
		if err := reply.check(id, p, data); err != nil {
			return reply, err
		}
		if rsp.Continue {
			if err := c.SendLogin(id, LoginPDU{CSG: p.CSG, NSG: p.NSG}); err != nil {
				return nil, err
			}
			continue
		}
		reply.Keys, err = ParseText(text)
		return reply, err
	}
}

func (r *LoginReply) check(id LoginID, p LoginPDU, data []byte) error {
	final := r.Transit && r.NSG == StageFull
	switch {
	case r.TaskTag != id.Tag:
		return fmt.Errorf("login response with task tag %#x, want %#x", r.TaskTag, id.Tag)
	case r.ISID != id.ISID:
		return fmt.Errorf("login response with ISID %x, want %x", r.ISID, id.ISID)
	case r.VersionMax != 0 || r.VersionActive != 0:
		return fmt.Errorf("login response with versions %d and %d, but there is only 0 (RFC 7143 "+
			"11.13.1)", r.VersionMax, r.VersionActive)
	case r.StatusClass != 0:
		return nil // the rest is reserved
	case r.Transit && r.Continue:
		return fmt.Errorf("login response with T and C both 1 (RFC 7143 11.13.7)")
	case r.CSG != p.CSG:
		return fmt.Errorf("login response of stage %d in stage %d (RFC 7143 6.3)", r.CSG, p.CSG)
	case r.Transit && !p.Transit:
		return fmt.Errorf("login response with T, but the request has none (RFC 7143 6.3)")
	case r.Transit && (r.NSG > p.NSG || r.NSG == StageReserved || r.NSG <= r.CSG):
		return fmt.Errorf("login response moves from stage %d to %d, but the request to %d (RFC "+
			"7143 6.3)", r.CSG, r.NSG, p.NSG)
	case p.Continue && (len(data) != 0 || r.Transit || r.Continue):
		return fmt.Errorf("a login request with C is answered with more than an empty response " +
			"(RFC 7143 6.2)")
	case final && id.TSIH == 0 && r.TSIH == 0:
		return fmt.Errorf("final login response without TSIH (RFC 7143 11.13.3)")
	case !final && r.TSIH != id.TSIH:
		return fmt.Errorf("TSIH %d in a login response that is not the final one (RFC 7143 "+
			"11.13.3)", r.TSIH)
	case len(data) > 8192:
		return fmt.Errorf("login response of %d bytes, over the default MaxRecvDataSegmentLength "+
			"(RFC 7143 6.3)", len(data))
	}
	return nil
}

// LoginOptions are the options of a login. The zero value is a normal session without CHAP and
// digests that offers every operational key.
type LoginOptions struct {
	Initiator string // default DefaultInitiator
	Target    string // default DefaultTarget
	Discovery bool
	ISID      [6]byte // default 80 00 00 00 00 00
	TSIH      uint16
	CID       uint16
	CmdSN     uint32 // of the first command; default 1

	CHAP *CHAP // nil: no authentication is offered

	HeaderDigest, DataDigest bool

	// Keys are operational keys that replace or extend the default ones. An empty value leaves a
	// key out.
	Keys Keys

	// WithSecurity starts in the security stage, even without CHAP.
	WithSecurity bool

	// Edit may change every Login Request before it is sent. Step counts from 0.
	Edit func(step int, p *LoginPDU)
}

// The default names. The target's is that of the original wrapper.
const (
	DefaultInitiator = "iqn.2026-01.test.example:initiator"
	DefaultTarget    = "iqn.2017-01.io.kubevirt:wrapper"
)

func (o *LoginOptions) identification() Keys {
	name, target := o.Initiator, o.Target
	name = cmp.Or(name, DefaultInitiator)
	target = cmp.Or(target, DefaultTarget)
	keys := KV("InitiatorName", name)
	if o.Discovery {
		return append(keys, Key{"SessionType", "Discovery"})
	}
	return append(keys, Key{"SessionType", "Normal"}, Key{"TargetName", target})
}

func (o *LoginOptions) operational() Keys {
	digest := map[bool]string{false: "None", true: "CRC32C"}
	keys := KV("HeaderDigest", digest[o.HeaderDigest], "DataDigest", digest[o.DataDigest],
		"MaxRecvDataSegmentLength", "65536", "DefaultTime2Wait", "2", "DefaultTime2Retain", "0",
		"ErrorRecoveryLevel", "0")
	if !o.Discovery {
		keys = append(keys, KV("InitialR2T", "No", "ImmediateData", "Yes", "MaxBurstLength",
			"262144", "FirstBurstLength", "65536",
			"MaxOutstandingR2T", "1", "MaxConnections", "1", "DataPDUInOrder", "Yes",
			"DataSequenceInOrder", "Yes")...)
	}
	for _, k := range o.Keys {
		if k.Value == "" {
			keys.Remove(k.Name)
		} else {
			keys.Set(k.Name, k.Value)
		}
	}
	return keys
}

// Login connects and logs in. A refusal is a *LoginError.
func Login(addr net.Addr, o LoginOptions) (*Session, error) {
	c, err := Dial(addr)
	if err != nil {
		return nil, err
	}
	s, err := c.Login(o)
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return s, nil
}

// login is a login in progress.
type login struct {
	c    *Conn
	o    *LoginOptions
	id   LoginID
	step int
	sent Keys // operational keys
	got  Keys
	tsih uint16
}

// Login logs in on a connection.
func (c *Conn) Login(o LoginOptions) (*Session, error) {
	l := &login{c: c, o: &o, id: LoginID{ISID: o.ISID, TSIH: o.TSIH, CID: o.CID, Tag: c.NewTag()}}
	if l.id.ISID == ([6]byte{}) {
		l.id.ISID = [6]byte{0x80}
	}
	if o.CmdSN != 0 {
		c.CmdSN = o.CmdSN
	}
	first := o.identification()
	if o.CHAP != nil || o.WithSecurity {
		if err := l.security(first); err != nil {
			return nil, err
		}
		first = nil
	}
	if err := l.operational(first); err != nil {
		return nil, err
	}
	return l.session()
}

// do sends one request and returns the answer. A refusal is an error.
func (l *login) do(p LoginPDU) (*LoginReply, error) {
	if l.o.Edit != nil {
		l.o.Edit(l.step, &p)
	}
	l.step++
	r, err := l.c.LoginStep(l.id, p)
	if err != nil {
		return nil, err
	}
	if r.StatusClass != 0 {
		return r, &LoginError{Status: r.Status()}
	}
	if r.Transit {
		l.tsih = r.TSIH
	}
	return r, nil
}

// security goes through the security stage.
func (l *login) security(first Keys) error {
	if l.o.CHAP == nil {
		r, err := l.do(LoginPDU{CSG: StageSecurity, NSG: StageOperational, Transit: true,
			Keys: append(first, Key{"AuthMethod", "None"})})
		if err != nil {
			return err
		}
		if !r.Transit {
			return fmt.Errorf("the target does not leave the security stage")
		}
		return nil
	}
	return l.o.CHAP.run(l, first)
}

// operational goes through the operational stage.
func (l *login) operational(first Keys) error {
	l.sent = l.o.operational()
	keys := append(first, l.sent...)
	for range 8 {
		r, err := l.do(LoginPDU{CSG: StageOperational, NSG: StageFull, Transit: true, Keys: keys})
		if err != nil {
			return err
		}
		l.got = append(l.got, r.Keys...)
		if r.Transit {
			return nil
		}
		keys = nil
	}
	return fmt.Errorf("the target does not leave the operational stage")
}

func (l *login) session() (*Session, error) {
	p, err := negotiated(l.sent, l.got)
	if err != nil {
		return nil, err
	}
	c := l.c
	c.HeaderDigest, c.DataDigest = p.HeaderDigest, p.DataDigest
	return &Session{Conn: c, Params: p, Answers: l.got, ISID: l.id.ISID, TSIH: l.tsih,
		CID: l.id.CID, AnswerPings: true}, nil
}
