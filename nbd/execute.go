package nbd

import (
	"errors"
	"fmt"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/serving"
)

const (
	// chunk is how many bytes of a request's data are moved at a time.
	chunk = 256 << 10
	// stretch is how much of a long trim or zeroing one call covers.
	stretch = 64 << 20
	// holesFrom is the length of a read from which looking for holes is worthwhile.
	holesFrom = 64 << 10
	// maxSkipped is the longest payload of a wrong request that is skipped: the most that a compact
	// header can announce. After a longer one the connection ends.
	maxSkipped = 1<<32 - 1
	// maxStatusPayload is longer than any payload of a BLOCK_STATUS that asks for each context
	// once, in bytes.
	maxStatusPayload = 8 + 4*32
	// longRequest is the length of a request that may keep a processor busy for long. Besides its
	// reader, a connection may execute maxLong of them. Guests discard 2 GiB at once, and a few
	// such requests must not delay their reads.
	longRequest = stretch
	maxLong     = 8
	// poorPiece is how many bytes of a write are read at a time while memory is scarce.
	poorPiece = 16 << 10
)

// errDisconnected says that the client has ended the transmission by NBD_CMD_DISC.
var errDisconnected = errors.New("the client has disconnected")

// failure is the answer to a request that cannot be executed.
type failure struct {
	code uint32
	text string
	off  int64 // place of the error, in bytes; -1: the whole request
}

func (f *failure) Error() string { return f.text }

func fail(code uint32, format string, args ...any) error {
	return &failure{code: code, text: fmt.Sprintf(format, args...), off: -1}
}

var (
	errMemory   = &failure{code: eNoMem, text: "there is no memory for the request now", off: -1}
	errReadOnly = &failure{code: ePerm, text: "the disk is write-protected", off: -1}
	errSlowZero = &failure{code: eNotSup, text: "this would not be faster than a write", off: -1}
)

// failureOf returns the answer for an error of a disk.
func failureOf(err error) *failure {
	var f *failure
	var medium *disk.MediumError
	switch {
	case errors.As(err, &f):
		return f
	case errors.As(err, new(*serving.Refusal)):
		return &failure{code: ePerm, text: err.Error(), off: -1}
	case errors.As(err, &medium):
		return &failure{code: eIO, text: err.Error(), off: medium.Off}
	case disk.IsNoSpace(err):
		return &failure{code: eNoSpace, text: err.Error(), off: -1}
	case errors.Is(err, disk.ErrReadOnly):
		return errReadOnly
	}
	return &failure{code: eIO, text: err.Error(), off: -1}
}

// allowed are the flags of each command; others are an error.
var allowed = [...]uint16{
	cmdRead:        cmdFlagFUA | cmdFlagDF,
	cmdWrite:       cmdFlagFUA,
	cmdFlush:       cmdFlagFUA,
	cmdTrim:        cmdFlagFUA,
	cmdCache:       cmdFlagFUA,
	cmdWriteZeroes: cmdFlagFUA | cmdFlagNoHole | cmdFlagFastZero,
	cmdBlockStatus: cmdFlagFUA | cmdFlagReqOne,
}

// handle executes one request. An error ends the connection. Afterwards the payload is consumed.
func (run *run) handle() error {
	c, q := run.c, &run.req
	switch {
	case q.payload > maxSkipped:
		return fmt.Errorf("a request with %d bytes of payload: %d are the most", q.payload,
			maxBlock)
	case q.command == cmdDisconnect:
		return errDisconnected
	}
	err := run.check()
	if err == nil && q.command == cmdWrite {
		return run.write()
	}
	var payload []byte
	if err == nil && q.payload > 0 { // only BLOCK_STATUS may have one
		run.buf = c.share.Must(int(q.payload))
		payload = run.buf.B
		q.payload = 0
		if err := c.rx.payload(payload); err != nil {
			run.forget()
			return err
		}
	}
	if err := c.rx.Discard(q.payload); err != nil {
		return err
	}
	if err == nil {
		if run.forward() {
			return nil
		}
		err = run.execute(payload)
	}
	return run.finish(err)
}

// finish ends a request. err nil means that the request has been answered. A request to a removed
// disk gets no answer, because its connection ends.
func (run *run) finish(err error) error {
	run.forget()
	if err == serving.ErrLater {
		run.c.late.Postpone(run.Turn, lateRequest{run.req, run.arrived})
		return nil
	}
	run.c.note(&run.req, run.arrived, err)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, serving.ErrRemoved):
		return err
	case errors.Is(err, serving.ErrAborted):
		if err := run.c.Cause(); err != nil {
			return err
		}
		err = run.c.client.Refused(run.c.disk) // the client was fenced; the connection goes on
	}
	run.answerError(failureOf(err))
	return nil
}

// note counts a request, and tells the observer how it has ended.
func (c *conn) note(q *request, arrived time.Time, err error) {
	c.commands.Add(1)
	done := serving.RequestEvent{Client: c.name, Op: serving.OpOther, Duration: time.Since(arrived)}
	if int(q.command) < len(operations) {
		done.Op = operations[q.command]
	}
	switch {
	case err != nil:
		done.Status = ownStatus(err)
	case q.command == cmdRead || q.command == cmdWrite:
		done.Bytes = int64(q.length)
	}
	c.srv.disks.Done(c.disk, done, err)
}

// ownStatus is the status for a fault of the request itself, or StatusGood.
func ownStatus(err error) uint8 {
	var own *failure
	switch {
	case !errors.As(err, &own):
		return serving.StatusGood
	case own.code == ePerm && own != errReadOnly:
		return serving.StatusConflict
	}
	return serving.StatusFailed
}

// operations are the kinds of work of the commands.
var operations = [...]serving.Operation{cmdRead: serving.OpRead, cmdWrite: serving.OpWrite,
	cmdFlush: serving.OpFlush, cmdTrim: serving.OpDiscard, cmdWriteZeroes: serving.OpWrite}

// check refuses a request that breaks the rules of the protocol.
func (run *run) check() error {
	c, q := run.c, &run.req
	if int(q.command) >= len(allowed) {
		return fail(eInval, "command %d is not known here", q.command)
	}
	flags := allowed[q.command]
	if c.extended && (q.command == cmdWrite || q.command == cmdBlockStatus) {
		flags |= cmdFlagPayloadLen
	}
	if q.command == cmdRead && !c.structured {
		flags &^= cmdFlagDF
	}
	switch {
	case q.flags&^flags != 0:
		return fail(eInval, "command %d has flags that it cannot have: %#x", q.command,
			q.flags&^flags)
	case q.command == cmdFlush:
		return nil
	case q.payload > maxBlock:
		return fail(eInval, "%d bytes of payload: %d are the most", q.payload, maxBlock)
	case q.command == cmdBlockStatus && q.flags&cmdFlagPayloadLen != 0:
		if q.payload > maxStatusPayload {
			return fail(eInval, "%d bytes of payload name more contexts than there are", q.payload)
		}
		return nil // its length comes with the payload
	}
	return run.checkRange(q.off, q.length)
}

func (run *run) checkRange(off, length uint64) error {
	size := uint64(run.c.disk.Size())
	if off <= size && length <= size-off {
		return nil
	}
	code := uint32(eInval)
	if run.req.command == cmdWrite || run.req.command == cmdWriteZeroes {
		code = eNoSpace
	}
	return fail(code, "%d bytes at %d are beyond the disk's end at %d", length, off, size)
}

// begin counts a use of the disk for a request, until end, unless the client may not use the disk.
func (run *run) begin() error {
	c, d := run.c, run.c.disk
	if !c.client.Used(d) {
		run.sendForwarded() // Begin may wait for other clients
		if !run.receiving { // and for requests of another session
			run.enter()
			defer run.Leave()
		}
	}
	err := c.client.Begin(d, run.req.changes())
	if err == disk.ErrReadOnly {
		return errReadOnly
	}
	return err
}

// enter marks a disk call that may take long. If memory is exhausted, or the connection has too
// many long requests, no other request is read meanwhile.
func (run *run) enter() {
	run.begun = time.Now()
	if run.req.length > longRequest && !run.long {
		if run.long = run.c.long.Add(1) <= maxLong; !run.long {
			run.c.long.Add(-1)
			run.blind = true
			run.c.blind.Store(true)
			return
		}
	}
	if !run.c.srv.disks.Memory.Exhausted() {
		run.Enter(run.c.disk)
	}
}

// leave ends the disk call of a read or write of one piece, whose time shows how fast the disk is.
func (run *run) leave() {
	if !run.late {
		run.Took(&run.r, run.c.disk, time.Since(run.begun))
	}
	run.Leave()
}

// execute executes and answers a request other than a write.
func (run *run) execute(payload []byte) error {
	c, q, d := run.c, &run.req, run.c.disk
	switch q.command {
	case cmdRead:
		return run.read()
	case cmdBlockStatus:
		return run.status(payload)
	}
	err := run.begin()
	if err != nil {
		return err
	}
	defer d.End()
	run.enter()
	switch q.command {
	case cmdFlush:
		err = d.Disk.Flush()
	case cmdTrim:
		err = run.trim()
	case cmdWriteZeroes:
		err = run.zero()
	case cmdCache:
		err = run.cache()
	}
	if err == nil && q.flags&cmdFlagFUA != 0 && q.command != cmdFlush && q.command != cmdCache {
		err = d.Disk.Flush()
	}
	run.Leave()
	if err == nil {
		c.answer(q, 0)
	}
	return err
}
