package target

import (
	"errors"
	"fmt"
	"net"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/login"
	"kubevirt.io/disk/target/internal/pdu"
	"kubevirt.io/disk/target/internal/scsi"
)

// maxLoginSegment is the longest data segment in bytes before full feature phase: the default of
// MaxRecvDataSegmentLength, which holds until the end of login (RFC 7143 13.12).
const maxLoginSegment = 8192

// loginDialog is the login phase of one connection (RFC 7143 6.3, 11.12, 11.13).
type loginDialog struct {
	c       *conn
	machine *login.Machine
	first   pdu.LoginRequest
	began   bool
	data    []byte
}

// runLogin reads login requests until the session is in full feature phase or refused. It reports
// whether it is in full feature phase.
func (c *conn) runLogin() bool {
	d := loginDialog{c: c, machine: login.NewMachine(&c.srv.login)}
	defer d.machine.Close()
	for {
		sess, err := d.exchange()
		if err != nil {
			d.log(err)
			return false
		}
		if sess != nil {
			return true
		}
	}
}

// refusal says that a login was answered with a status other than success.
type refusal struct {
	status login.Status
	reason string
	err    error
	more   []zap.Field // more fields for the line in the log
	say    bool        // write that line
}

func (r *refusal) Error() string { return r.err.Error() }
func (r *refusal) Unwrap() error { return r.err }

func (d *loginDialog) log(err error) {
	c := d.c
	if cause := c.Cause(); cause != nil {
		err = cause
	}
	res := d.machine.Result()
	ev := serving.LoginEvent{Client: res.InitiatorName, Remote: c.remote.String(),
		Target: res.TargetName, User: res.Tried, Discovery: res.SessionType == login.Discovery,
		Err: err, Reason: "connection_closed"}
	fields := []zap.Field{zap.Error(err)}
	var r *refusal
	switch {
	case errors.As(err, &r):
		ev.Reason = r.reason
		fields = append(fields, zap.Stringer("status", r.status))
	case errors.Is(err, serving.ErrPushedOut):
		ev.Reason = "pushed_out"
		c.srv.opt.Disks.Observer.LoginRefused(ev)
		return // the log has one line for many such connections
	case !d.began && (c.rx.Heard.Load() == 0 || c.Cause() != nil):
		// This is a port scan or a health check: the peer has sent nothing.
		c.log().Debug("connection closed before login", zap.Error(err))
		return
	case isTimeout(err):
		ev.Reason = "timeout"
	case !d.began:
		ev.Reason = reasonNoLogin
	}
	c.srv.opt.Disks.Observer.LoginRefused(ev)
	if r == nil {
		r = &refusal{}
		r.more, r.say = c.failed(ev.Reason)
	}
	if !r.say {
		return
	}
	fields = append(fields, zap.String("reason", ev.Reason), zap.String("initiator", ev.Client),
		zap.String("target", ev.Target), zap.String("user", ev.User))
	c.log().Warn("login refused", append(fields, r.more...)...)
}

// reasonNoLogin is the reason of an end when the peer sends something else than a login.
const reasonNoLogin = "not_a_login"

func isTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}

// exchange handles one request and its response. After the last one it returns the session.
func (d *loginDialog) exchange() (*session, error) {
	c := d.c
	ahs, err := c.rx.next()
	if err != nil {
		return nil, err
	}
	h := &c.rx.hdr
	if op := h.Opcode(); op != pdu.OpLoginRequest {
		if !d.began {
			if err := c.srv.conns.AwaitPenalty(&c.Conn); err != nil {
				return nil, err
			}
			return nil, fmt.Errorf("this is no iSCSI: the peer does not begin with a Login "+
				"Request but with opcode %v", op)
		}
		d.first.TaskTag = h.TaskTag()
		return nil, d.refuse(&d.first, login.StatusInvalidDuringLogin, reasonNoLogin,
			fmt.Errorf("opcode %v during login", op))
	}
	var req pdu.LoginRequest
	if err := req.Decode(h); err != nil {
		return nil, d.refuse(&req, login.StatusInitiatorError, "bad_pdu", err)
	}
	if !d.began {
		d.began = true
		d.first = req
		c.tx.sess.exp.Store(req.CmdSN)
		c.tx.sess.max.Store(req.CmdSN)
		c.tx.statSN = req.ExpStatSN
		c.Began.Store(true)
		if err := c.srv.conns.AwaitPenalty(&c.Conn); err != nil {
			return nil, err
		}
	}
	switch {
	case len(ahs) > 0:
		return nil, d.refuse(&req, login.StatusInitiatorError, "bad_pdu",
			errors.New("additional header segments in a Login Request"))
	case req.DataLen > maxLoginSegment:
		return nil, d.refuse(&req, login.StatusInitiatorError, "bad_pdu",
			fmt.Errorf("a login data segment of %d bytes, over the limit of %d", req.DataLen,
				maxLoginSegment))
	}
	if cap(d.data) < req.DataLen {
		d.data = make([]byte, req.DataLen)
	}
	d.data = d.data[:req.DataLen]
	if err := c.rx.data.readInto(d.data); err != nil {
		return nil, err
	}
	resp := d.machine.Step(&login.Request{CSG: login.Stage(req.CSG), NSG: login.Stage(req.NSG),
		Transit: req.Transit, Continue: req.Continue, VersionMin: req.VersionMin,
		VersionMax: req.VersionMax, ISID: req.ISID, TSIH: req.TSIH, CID: req.CID, Data: d.data})
	if resp.Status != login.StatusSuccess {
		return nil, d.refuse(&req, resp.Status, resp.Reason, resp.Err)
	}
	if req.TSIH != 0 && d.machine.Authenticated() {
		return nil, d.refuseJoining(&req)
	}
	if !d.machine.Done() {
		// The TSIH is repeated until the final response (RFC 7143 11.13.3).
		return nil, d.answer(&req, &resp, req.TSIH)
	}
	return d.complete(&req, &resp)
}

// refuseJoining refuses a connection for an existing session: a session has one connection, and at
// error recovery level 0 no connection is taken over. The status depends on whose session it is
// (RFC 7143 6.3.1, the table of logins). Without authentication a stranger could find out who has a
// session here, so the answer comes only after that. Users do not learn of each other's sessions.
func (d *loginDialog) refuseJoining(req *pdu.LoginRequest) error {
	res := d.machine.Result()
	key := sessionKey{initiator: res.InitiatorName, isid: req.ISID}
	if d.c.srv.hasSession(key, req.TSIH, res.User) {
		return d.refuse(req, login.StatusTooManyConnections, "too_many_connections",
			errors.New("a second connection for a session, which has one at most"))
	}
	return d.refuse(req, login.StatusSessionDoesNotExist, "no_such_session",
		fmt.Errorf("this initiator has no session of that identifier with handle %d", req.TSIH))
}

// complete makes the session of a successful login. The session that it reinstates ends first, so
// that none of its commands begins to change a disk any more (RFC 7143 6.3.5). A write that hangs
// in a disk may still land: the login does not wait for it, but later writes to its blocks do.
func (d *loginDialog) complete(req *pdu.LoginRequest, resp *login.Response) (*session, error) {
	c := d.c
	res := d.machine.Result()
	sess := &session{
		conn:   c,
		key:    sessionKey{initiator: res.InitiatorName, isid: req.ISID},
		cid:    req.CID,
		login:  res,
		params: res.Params,
		since:  time.Now(),
		tasks:  make(map[uint32]*task),
	}
	sess.window.exp.Store(c.tx.sess.exp.Load())
	if res.SessionType == login.Normal {
		c.srv.opt.Disks.EndStale(res.InitiatorName)
		// Attach the nexus before the session is registered: from then on others use the nexus.
		sess.nexus = c.srv.device.Attach(scsi.InitiatorPort{Name: res.InitiatorName,
			ISID: req.ISID})
		sess.nexus.SetProtocolLevel(res.Params.ProtocolLevel)
		sess.nexus.SetAddress(hostOf(c.remote))
		c.SetClient(sess.nexus.Client)
	}
	c.takeSocket()
	c.role = c.srv.opt.Disks.NewReader(&c.Conn, c.readLoop, c.handOn)
	c.late = serving.NewLate[*task](c.srv.opt.Disks, &c.Conn, fewLate, c.lateLoop, func() {})
	old, err := c.srv.register(sess)
	if err != nil {
		if sess.nexus != nil {
			c.srv.device.Detach(sess.nexus)
		}
		status, reason := login.StatusServiceUnavailable, "shutting_down"
		switch {
		case errors.Is(err, errNotYours):
			status, reason = login.StatusAuthorizationFailure, "session_of_another_user"
		case errors.Is(err, serving.ErrCrowded):
			status, reason = login.StatusOutOfResources, "too_many_sessions"
		case errors.Is(err, serving.ErrPeerCrowded):
			status, reason = login.StatusOutOfResources, "too_many_sessions_from_address"
		}
		return nil, d.refuse(req, status, reason, err)
	}
	if old != nil {
		old.leave(errReinstated)
	}
	c.sess.Store(sess)
	c.tx.sess = &sess.window
	if sess.nexus != nil {
		sess.nexus.SetLine(c)
	}
	// If the peer is gone, the reader ends the session, which still counts as a session.
	if err := d.answer(req, resp, sess.tsih); err != nil {
		c.fail(err)
	}
	c.rx.headerDigest, c.rx.dataDigest = res.Params.HeaderDigest, res.Params.DataDigest
	c.tx.setDigests(res.Params.HeaderDigest, res.Params.DataDigest)
	c.rx.grow(c.srv.pool, &c.srv.working)
	sess.open.Store(true)
	if c.srv.conns.Closing() {
		sess.requestLogout() // Shutdown may have looked before the session was open
	}
	c.srv.opt.Disks.Observer.LoginAccepted(serving.LoginEvent{Client: res.InitiatorName,
		Remote: c.remote.String(),
		Target: res.TargetName, User: res.User, Discovery: sess.discovery()})
	level := zap.InfoLevel
	if c.Slowed {
		level = zap.DebugLevel
	}
	c.log().Log(level, "login", zap.String("initiator", res.InitiatorName),
		zap.String("target", res.TargetName), zap.String("user", res.User),
		zap.Bool("discovery", sess.discovery()), zap.Uint16("tsih", sess.tsih),
		zap.Bool("header_digest", res.Params.HeaderDigest),
		zap.Bool("data_digest", res.Params.DataDigest), zap.Bool("reinstated", old != nil))
	return sess, nil
}

// answer sends a login response with status success.
func (d *loginDialog) answer(req *pdu.LoginRequest, resp *login.Response, tsih uint16) error {
	d.c.tx.send(&pdu.LoginResponse{Transit: resp.Transit, Continue: resp.Continue,
		CSG: uint8(resp.CSG), NSG: uint8(resp.NSG), ISID: req.ISID, TSIH: tsih,
		TaskTag: req.TaskTag, DataLen: len(resp.Data)}, snAdvance, resp.Data, nil)
	return d.c.tx.Flush()
}

// refuse sends a login response with another status. The connection closes after that.
func (d *loginDialog) refuse(req *pdu.LoginRequest, status login.Status, reason string,
	err error) error {
	r := &refusal{status: status, reason: reason, err: err}
	r.more, r.say = d.c.failed(reason) // before the answer: the peer may be back at once
	d.c.tx.send(&pdu.LoginResponse{CSG: req.CSG, ISID: req.ISID, TSIH: req.TSIH,
		TaskTag:     req.TaskTag,
		StatusClass: uint8(status >> 8), StatusDetail: uint8(status)}, snAdvance, nil, nil)
	if ferr := d.c.tx.Flush(); ferr == nil {
		d.c.linger()
	}
	return r
}

// hostOf returns an address without its port.
func hostOf(a net.Addr) string {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr().Unmap().String()
	}
	return a.String()
}
