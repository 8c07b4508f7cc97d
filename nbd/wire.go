package nbd

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// The constants of the protocol, by the names of its specification without the prefix NBD_.
const (
	magicInit       = 0x4e42444d41474943 // "NBDMAGIC"
	magicOption     = 0x49484156454f5054 // "IHAVEOPT"
	magicReply      = 0x0003e889045565a9
	magicRequest    = 0x25609513
	magicExtRequest = 0x21e41c71
	magicSimple     = 0x67446698
	magicStructured = 0x668e33ef
	magicExtReply   = 0x6e8a278c

	// Handshake flags and the client's flags.
	flagFixedNewstyle = 1 << 0
	flagNoZeroes      = 1 << 1

	// Transmission flags.
	flagHasFlags       = 1 << 0
	flagReadOnly       = 1 << 1
	flagSendFlush      = 1 << 2
	flagSendFUA        = 1 << 3
	flagSendTrim       = 1 << 5
	flagSendZeroes     = 1 << 6
	flagSendDF         = 1 << 7
	flagMultiConn      = 1 << 8
	flagSendCache      = 1 << 10
	flagSendFastZero   = 1 << 11
	flagStatusPayloads = 1 << 12

	optExportName      = 1
	optAbort           = 2
	optList            = 3
	optStartTLS        = 5
	optInfo            = 6
	optGo              = 7
	optStructuredReply = 8
	optListMeta        = 9
	optSetMeta         = 10
	optExtendedHeaders = 11

	repAck         = 1
	repServer      = 2
	repInfo        = 3
	repMetaContext = 4

	repErr             = 1 << 31
	repErrUnsup        = repErr | 1
	repErrPolicy       = repErr | 2
	repErrInvalid      = repErr | 3
	repErrTLSRequired  = repErr | 5
	repErrUnknown      = repErr | 6
	repErrShutdown     = repErr | 7
	repErrTooBig       = repErr | 9
	repErrExtHeaderReq = repErr | 10

	infoExport      = 0
	infoName        = 1
	infoDescription = 2
	infoBlockSize   = 3

	cmdRead        = 0
	cmdWrite       = 1
	cmdDisconnect  = 2
	cmdFlush       = 3
	cmdTrim        = 4
	cmdCache       = 5
	cmdWriteZeroes = 6
	cmdBlockStatus = 7

	cmdFlagFUA        = 1 << 0
	cmdFlagNoHole     = 1 << 1
	cmdFlagDF         = 1 << 2
	cmdFlagReqOne     = 1 << 3
	cmdFlagFastZero   = 1 << 4
	cmdFlagPayloadLen = 1 << 5

	replyFlagDone = 1 << 0

	chunkNone        = 0
	chunkData        = 1
	chunkHole        = 2
	chunkStatus      = 5
	chunkStatusExt   = 6
	chunkError       = 1<<15 | 1
	chunkErrorOffset = 1<<15 | 2

	stateHole = 1 << 0
	stateZero = 1 << 1
	// of qemu:dirty-bitmap, by QEMU's documentation
	stateDirty = 1 << 0
)

// Errors of replies.
const (
	ePerm     = 1
	eIO       = 5
	eNoMem    = 12
	eInval    = 22
	eNoSpace  = 28
	eOverflow = 75
	eNotSup   = 95
	eShutdown = 108
)

const (
	requestLen    = 28
	extRequestLen = 32
	// headLen is the longest head of a reply: an extended header, and the offset and length of a
	// hole.
	headLen = 32 + 12
	// maxString is the longest string of the protocol, in bytes.
	maxString = 4096
)

// request is a request message.
type request struct {
	flags, command uint16
	cookie         uint64
	off, length    uint64 // bytes
	payload        uint64 // bytes that follow the header
}

// changes reports whether the request changes the disk.
func (q *request) changes() bool {
	return q.command == cmdWrite || q.command == cmdTrim || q.command == cmdWriteZeroes
}

// errMagic says that the client has sent something else than a request. Nothing after it can be
// understood.
var errMagic = errors.New("what the client sends does not begin like a request")

// decodeRequest decodes the header of a request. b has requestLen or, if extended headers are
// negotiated, extRequestLen bytes.
func decodeRequest(b []byte, extended bool) (r request, err error) {
	want := uint32(magicRequest)
	if extended {
		want = magicExtRequest
	}
	if binary.BigEndian.Uint32(b) != want {
		return request{}, errMagic
	}
	r.flags = binary.BigEndian.Uint16(b[4:])
	r.command = binary.BigEndian.Uint16(b[6:])
	r.cookie = binary.BigEndian.Uint64(b[8:])
	r.off = binary.BigEndian.Uint64(b[16:])
	if extended {
		r.length = binary.BigEndian.Uint64(b[24:])
	} else {
		r.length = uint64(binary.BigEndian.Uint32(b[24:]))
	}
	// The specification asks a client for PAYLOAD_LEN in each write with extended headers. QEMU,
	// from 8.2 on, negotiates extended headers and leaves the flag out, and its own server accepts
	// that.
	if r.command == cmdWrite || extended && r.flags&cmdFlagPayloadLen != 0 {
		r.payload = r.length
	}
	return r, nil
}

// head is the header of a reply on its way to the wire, with the fixed part of its payload.
type head struct {
	b [headLen]byte
	n int
}

// simple makes a simple reply. Data may follow.
func (h *head) simple(cookie uint64, code uint32) {
	binary.BigEndian.PutUint32(h.b[0:], magicSimple)
	binary.BigEndian.PutUint32(h.b[4:], code)
	binary.BigEndian.PutUint64(h.b[8:], cookie)
	h.n = 16
}

// chunk makes the header of a chunk for a request, with that many bytes of payload.
func (h *head) chunk(r *request, extended bool, flags, kind uint16, payload uint64) {
	binary.BigEndian.PutUint16(h.b[4:], flags)
	binary.BigEndian.PutUint16(h.b[6:], kind)
	binary.BigEndian.PutUint64(h.b[8:], r.cookie)
	if extended {
		binary.BigEndian.PutUint32(h.b[0:], magicExtReply)
		binary.BigEndian.PutUint64(h.b[16:], r.off)
		binary.BigEndian.PutUint64(h.b[24:], payload)
		h.n = 32
		return
	}
	binary.BigEndian.PutUint32(h.b[0:], magicStructured)
	binary.BigEndian.PutUint32(h.b[16:], uint32(payload))
	h.n = 20
}

func (h *head) put64(v uint64) {
	binary.BigEndian.PutUint64(h.b[h.n:], v)
	h.n += 8
}

func (h *head) put32(v uint32) {
	binary.BigEndian.PutUint32(h.b[h.n:], v)
	h.n += 4
}

// appendError appends the payload of an error chunk. off < 0: no offset.
func appendError(p []byte, code uint32, text string, off int64) []byte {
	text = text[:min(len(text), maxString)]
	p = binary.BigEndian.AppendUint32(p, code)
	p = binary.BigEndian.AppendUint16(p, uint16(len(text)))
	p = append(p, text...)
	if off >= 0 {
		p = binary.BigEndian.AppendUint64(p, uint64(off))
	}
	return p
}

// option is an option of the handshake.
type option struct {
	number uint32
	data   []byte
}

// fields reads the fields of an option's data. After an error all later fields are zero.
type fields struct {
	b   []byte
	bad bool
}

func (f *fields) take(n uint32) []byte {
	if f.bad || uint64(n) > uint64(len(f.b)) {
		f.bad = true
		return nil
	}
	p := f.b[:n]
	f.b = f.b[n:]
	return p
}

func (f *fields) u16() uint16 {
	if p := f.take(2); p != nil {
		return binary.BigEndian.Uint16(p)
	}
	return 0
}

func (f *fields) u32() uint32 {
	if p := f.take(4); p != nil {
		return binary.BigEndian.Uint32(p)
	}
	return 0
}

func (f *fields) u64() uint64 {
	if p := f.take(8); p != nil {
		return binary.BigEndian.Uint64(p)
	}
	return 0
}

func (f *fields) text() string { return string(f.take(f.u32())) }

// ended reports whether all fields were there, and nothing is left.
func (f *fields) ended() bool { return !f.bad && len(f.b) == 0 }

// infoRequest is the data of INFO and GO.
type infoRequest struct {
	name  string
	infos []uint16
}

func decodeInfoRequest(p []byte) (r infoRequest, err error) {
	f := fields{b: p}
	r.name = f.text()
	for range f.u16() {
		r.infos = append(r.infos, f.u16())
		if f.bad {
			break
		}
	}
	if !f.ended() {
		return infoRequest{}, errors.New("its length contradicts its content")
	}
	return r, checkText(r.name)
}

// metaRequest is the data of LIST_META_CONTEXT and SET_META_CONTEXT.
type metaRequest struct {
	name    string
	queries []string
}

func decodeMetaRequest(p []byte) (r metaRequest, err error) {
	f := fields{b: p}
	r.name = f.text()
	for range f.u32() {
		q := f.text()
		if f.bad {
			break
		}
		if err := checkText(q); err != nil {
			return metaRequest{}, err
		}
		r.queries = append(r.queries, q)
	}
	if !f.ended() {
		return metaRequest{}, errors.New("its length contradicts its content")
	}
	return r, checkText(r.name)
}

// checkText refuses what is no string of the protocol.
func checkText(s string) error {
	if len(s) > maxString {
		return fmt.Errorf("a string of %d bytes is over the limit of %d", len(s), maxString)
	}
	for i := range len(s) {
		if s[i] == 0 {
			return errors.New("a string contains a zero byte")
		}
	}
	return nil
}

// decodeStatusPayload decodes the payload of a BLOCK_STATUS: the contexts that the client wants.
func decodeStatusPayload(p []byte) (length uint64, contexts []uint32, err error) {
	if len(p) < 8 || len(p)%4 != 0 {
		return 0, nil, errors.New("its payload has an impossible length")
	}
	length = binary.BigEndian.Uint64(p)
	for p = p[8:]; len(p) > 0; p = p[4:] {
		contexts = append(contexts, binary.BigEndian.Uint32(p))
	}
	return length, contexts, nil
}
