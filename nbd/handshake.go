package nbd

import (
	"bufio"
	"cmp"
	"crypto/tls"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/serving"
)

const (
	// maxOption is how many bytes of data an option may have. A list of metadata contexts may
	// legally be longer, but no client needs that.
	maxOption = 16 << 10
	// maxOptions is how many options a client may send before it chooses an export.
	maxOptions = 1000

	// Block sizes in bytes: the smallest, the best and the largest that a request should have.
	minBlock  = 512
	bestBlock = 4 << 10
	maxBlock  = 32 << 20
)

// handshake is the negotiation of one connection. It ends with the choice of an export.
type handshake struct {
	c   *conn
	nc  net.Conn // in TLS, once that is on
	in  *bufio.Reader
	tls bool

	noZeroes bool
	denied   error // why a client with this certificate is refused
	// the export of the last SET_META_CONTEXT, the disk that had this name then, and the chosen
	// contexts
	contextsOf      string
	contextsOn      *serving.Disk
	contexts        contextSet
	snapshots       []disk.Snapshot // the snapshots of contextBitmap and the next ones
	session         string          // the session that SET_META_CONTEXT has chosen; "": none
	migrationTarget bool            // the client is the target of a live migration
	diskInfo        diskInfo        // the description that the client has got
}

// errOptionAbort says that the client has ended the negotiation by NBD_OPT_ABORT.
var errOptionAbort = errors.New("the client has ended the negotiation")

// run negotiates until the client has chosen an export or gone.
func (h *handshake) run() error {
	h.in = bufio.NewReaderSize(h.nc, socket.SmallBuffer)
	hello := binary.BigEndian.AppendUint64(nil, magicInit)
	hello = binary.BigEndian.AppendUint64(hello, magicOption)
	hello = binary.BigEndian.AppendUint16(hello, flagFixedNewstyle|flagNoZeroes)
	if _, err := h.nc.Write(hello); err != nil {
		return err
	}
	var flags [4]byte
	if _, err := io.ReadFull(h.in, flags[:]); err != nil {
		return err
	}
	h.c.Began.Store(true)
	client := binary.BigEndian.Uint32(flags[:])
	if client&^uint32(flagFixedNewstyle|flagNoZeroes) != 0 {
		return fmt.Errorf("the client has unknown flags: %#x", client)
	}
	h.noZeroes = client&flagNoZeroes != 0
	for range maxOptions {
		o, err := h.next()
		if err != nil {
			return err
		}
		done, err := h.option(o)
		if done || err != nil {
			return err
		}
	}
	return fmt.Errorf("the client has sent %d options and chosen no export", maxOptions)
}

// next reads the next option. It answers and skips one whose data is too long.
func (h *handshake) next() (option, error) {
	for range maxOptions {
		var head [16]byte
		if _, err := io.ReadFull(h.in, head[:]); err != nil {
			return option{}, err
		}
		if binary.BigEndian.Uint64(head[:]) != magicOption {
			return option{}, errors.New("what the client sends does not begin like an option")
		}
		o := option{number: binary.BigEndian.Uint32(head[8:])}
		n := binary.BigEndian.Uint32(head[12:])
		if n <= maxOption {
			o.data = make([]byte, n)
			_, err := io.ReadFull(h.in, o.data)
			return o, err
		}
		if o.number == optExportName {
			return option{}, fmt.Errorf("an export name of %d bytes", n)
		}
		if n > maxBlock {
			return option{}, fmt.Errorf("an option with %d bytes of data", n)
		}
		if _, err := io.CopyN(io.Discard, h.in, int64(n)); err != nil {
			return option{}, err
		}
		if err := h.refuse(o, repErrTooBig, "%d bytes of data are over the limit of %d", n,
			maxOption); err != nil {
			return option{}, err
		}
	}
	return option{}, errors.New("too many options")
}

// reply answers an option.
func (h *handshake) reply(o option, kind uint32, data []byte) error {
	p := binary.BigEndian.AppendUint64(make([]byte, 0, 20+len(data)), magicReply)
	p = binary.BigEndian.AppendUint32(p, o.number)
	p = binary.BigEndian.AppendUint32(p, kind)
	p = binary.BigEndian.AppendUint32(p, uint32(len(data)))
	_, err := h.nc.Write(append(p, data...))
	return err
}

func (h *handshake) ack(o option) error { return h.reply(o, repAck, nil) }

// refuse answers an option with an error, and a text for people.
func (h *handshake) refuse(o option, kind uint32, format string, args ...any) error {
	text := fmt.Sprintf(format, args...)
	return h.reply(o, kind, []byte(text[:min(len(text), maxString)]))
}

// option handles one option. done says that an export was chosen.
func (h *handshake) option(o option) (done bool, err error) {
	switch {
	case h.c.srv.conns.Closing() && o.number != optAbort:
		if o.number == optExportName {
			return false, ErrServerClosed
		}
		return false, h.refuse(o, repErrShutdown, "the server is shutting down")
	case h.c.portal.TLS != nil && !h.tls && o.number != optStartTLS && o.number != optAbort:
		if o.number == optExportName {
			return false, errors.New("the client does not use TLS")
		}
		return false, h.refuse(o, repErrTLSRequired, "this server needs TLS with a certificate")
	}
	switch o.number {
	case optExportName, optInfo, optGo, optList, optListMeta, optSetMeta:
		err := h.c.srv.disks.Refusal(h.c.name, h.c.log())
		switch {
		case err == nil:
		case o.number == optExportName: // every other answer would break the protocol
			return false, fmt.Errorf("%w: %w", serving.ErrRefused, err)
		default:
			return false, h.refuse(o, repErrPolicy, "%v", err)
		}
	}
	if h.denied != nil && o.number != optAbort {
		if o.number == optExportName {
			return false, h.denied
		}
		return false, h.refuse(o, repErrPolicy, "%v", h.denied)
	}
	switch o.number {
	case optExportName:
		return true, h.exportName(o)
	case optAbort:
		_ = h.ack(o)
		return false, errOptionAbort
	case optList:
		return false, h.list(o)
	case optStartTLS:
		return false, h.startTLS(o)
	case optInfo, optGo:
		return h.info(o)
	case optStructuredReply:
		if ok, err := h.noData(o); !ok {
			return false, err
		}
		if h.c.extended {
			return false, h.refuse(o, repErrExtHeaderReq, "extended headers are chosen already")
		}
		h.c.structured = true
		return false, h.ack(o)
	case optExtendedHeaders:
		if ok, err := h.noData(o); !ok {
			return false, err
		}
		h.c.structured, h.c.extended = true, true
		return false, h.ack(o)
	case optListMeta, optSetMeta:
		return false, h.meta(o)
	}
	return false, h.refuse(o, repErrUnsup, "option %d is not known here", o.number)
}

// noData refuses data of an option that has none.
func (h *handshake) noData(o option) (bool, error) {
	if len(o.data) == 0 {
		return true, nil
	}
	return false, h.refuse(o, repErrInvalid, "option %d has no data", o.number)
}

// list answers with the names of all exports.
func (h *handshake) list(o option) error {
	if ok, err := h.noData(o); !ok {
		return err
	}
	for _, d := range h.c.srv.disks.All() {
		name := h.c.srv.exportOf(d)
		p := binary.BigEndian.AppendUint32(nil, uint32(len(name)))
		p = append(p, name...)
		p = append(p, describe(d)...)
		if err := h.reply(o, repServer, p); err != nil {
			return err
		}
	}
	return h.ack(o)
}

// exportOf is the disk's name in a LIST: its own name; or its number if another disk has that name,
// or if no XML could have it; or its NAA identifier if another disk also has a name equal to that
// number.
func (s *Server) exportOf(d *serving.Disk) string {
	for _, name := range []string{d.Name, strconv.Itoa(int(d.Number))} {
		if name == "" || printable([]byte(name)) != name {
			continue
		}
		if found, _ := s.find(name); found == d {
			return name
		}
	}
	return hex.EncodeToString(d.Identity.NAA[:])
}

// Export is the name by which clients find the disk with a number: see exportOf.
func (s *Server) Export(number uint16) string {
	if d := s.disks.At(number); d != nil {
		return s.exportOf(d)
	}
	return strconv.Itoa(int(number))
}

func describe(d *serving.Disk) string { return fmt.Sprintf("LUN %d, %s", d.Number, d.Name) }

// find returns the disk with a name. The empty name is for a server's only disk.
func (s *Server) find(name string) (*serving.Disk, error) {
	all := s.disks.All()
	if name == "" {
		if len(all) == 1 {
			return all[0], s.mayMean(all[0])
		}
		names := ""
		for _, d := range all {
			names += fmt.Sprintf(" %q", s.exportOf(d))
		}
		if names == "" {
			return nil, errors.New("there is no disk")
		}
		return nil, fmt.Errorf("the empty name is for a server with one disk; this one has%s",
			names)
	}
	var found *serving.Disk
	for _, d := range all {
		if d.Name == name && found != nil {
			return nil, fmt.Errorf("LUN %d and LUN %d are called %q: choose one by its number",
				found.Number, d.Number, name)
		} else if d.Name == name {
			found = d
		}
	}
	if found != nil {
		return found, nil
	}
	if n := serving.NumberIn(name); n != 0 {
		if d := s.disks.At(n); d != nil {
			return d, nil
		}
	}
	for _, d := range all {
		if hex.EncodeToString(d.Identity.NAA[:]) == name {
			return d, nil
		}
	}
	return nil, fmt.Errorf("there is no disk %q", name)
}

// mayMean refuses the empty name for a disk if clients used it for another disk, which was removed.
// They connect again, and would take the new disk for the former one.
func (s *Server) mayMean(d *serving.Disk) error {
	s.mu.Lock()
	lost, name := s.lost, s.lostName
	s.mu.Unlock()
	if lost == (disk.Identity{}) || lost == d.Identity {
		return nil
	}
	return fmt.Errorf("the empty name was %s, which was removed while clients had it: name the "+
		"disk that you mean, %q", name, s.exportOf(d))
}

// find is Server.find, and logs a name that is not found: many clients do not show the error.
func (h *handshake) find(name string) (*serving.Disk, error) {
	d, err := h.c.srv.find(name)
	if err != nil {
		if n, ok := h.c.srv.missed.Admit(name, time.Now()); ok {
			h.c.log().Warn("a client asks for an export that does not exist",
				append(serving.Unsaid(n), zap.String("export", name), zap.Error(err))...)
		}
	}
	return d, err
}

// startTLS turns TLS on. Options from before have no effect afterwards.
func (h *handshake) startTLS(o option) error {
	if ok, err := h.noData(o); !ok {
		return err
	}
	switch {
	case h.tls:
		return h.refuse(o, repErrInvalid, "TLS is in use already")
	case h.c.portal.TLS == nil:
		return h.refuse(o, repErrPolicy, "this portal has no certificate")
	case h.in.Buffered() > 0:
		return errors.New("data in plain text follows the request for TLS")
	}
	if err := h.ack(o); err != nil {
		return err
	}
	nc := tls.Server(&records{Conn: h.nc}, h.c.portal.TLS)
	if err := nc.HandshakeContext(h.c.srv.ctx); err != nil {
		return fmt.Errorf("TLS: %w", err)
	}
	name, form, err := certificateName(nc.ConnectionState())
	if err != nil {
		return err
	}
	h.denied = h.c.srv.enlist(h.c, name, form)
	h.nc, h.tls, h.c.name, h.c.certified = nc, true, name, true
	h.in = bufio.NewReaderSize(nc, socket.SmallBuffer)
	h.c.structured, h.c.extended, h.contexts, h.snapshots = false, false, 0, nil
	return nil
}

// exportName handles EXPORT_NAME. The protocol has no answer for an error.
func (h *handshake) exportName(o option) error {
	name := string(o.data)
	if err := checkText(name); err != nil {
		return err
	}
	if h.c.extended {
		return errors.New("EXPORT_NAME with extended headers is not allowed")
	}
	d, err := h.find(name)
	if err == nil {
		err = h.choose(d, name)
	}
	if err != nil {
		return err
	}
	p := binary.BigEndian.AppendUint64(nil, uint64(d.Size()))
	p = binary.BigEndian.AppendUint16(p, h.flags(d))
	if !h.noZeroes {
		p = append(p, make([]byte, 124)...)
	}
	_, err = h.nc.Write(p)
	return err
}

// info handles INFO and GO.
func (h *handshake) info(o option) (done bool, err error) {
	r, err := decodeInfoRequest(o.data)
	if err != nil {
		return false, h.refuse(o, repErrInvalid, "%v", err)
	}
	d, err := h.find(r.name)
	if err != nil {
		return false, h.refuse(o, repErrUnknown, "%v", err)
	}
	if o.number == optGo {
		switch err := h.choose(d, r.name); {
		case errors.Is(err, serving.ErrRemoved):
			return false, err
		case err != nil:
			if rerr := h.refuse(o, repErrPolicy, "%v", err); h.c.disk == nil || rerr != nil {
				return false, rerr
			}
			return false, err
		}
	}
	p := binary.BigEndian.AppendUint16(nil, infoExport)
	p = binary.BigEndian.AppendUint64(p, uint64(d.Size()))
	if err := h.reply(o, repInfo, binary.BigEndian.AppendUint16(p, h.flags(d))); err != nil {
		return false, err
	}
	// Every client gets the block size: those that do not know it ignore it.
	p = binary.BigEndian.AppendUint16(nil, infoBlockSize)
	for _, size := range []uint32{uint32(d.BlockSize), bestBlock, maxBlock} {
		p = binary.BigEndian.AppendUint32(p, size)
	}
	if err := h.reply(o, repInfo, p); err != nil {
		return false, err
	}
	for _, kind := range r.infos {
		p := binary.BigEndian.AppendUint16(nil, kind)
		switch kind {
		case infoName:
			p = append(p, h.c.srv.exportOf(d)...)
		case infoDescription:
			p = append(p, describe(d)...)
		default:
			continue
		}
		if err := h.reply(o, repInfo, p); err != nil {
			return false, err
		}
	}
	return o.number == optGo, h.ack(o)
}

// choose sets the disk of the connection. After an error the connection must end: it has a reader
// and a place in the limits, and may have the disk, so that a removal or a fence finds it.
func (h *handshake) choose(d *serving.Disk, name string) error {
	if err := h.c.srv.chosen(h.c); err != nil {
		return err
	}
	session, migrationTarget := "", false
	if h.contextsOn != nil && h.contextsOf == name {
		if h.contextsOn != d { // the contexts were agreed on for another disk
			return fmt.Errorf("%w: another disk has the name %q by now", serving.ErrRemoved, name)
		}
		h.c.contexts, h.c.snapshots = h.contexts, h.snapshots
		session, migrationTarget = h.session, h.migrationTarget
	}
	h.c.attach(d, name == "", session, migrationTarget)
	switch { // a removal, or a takeover, may not have found this connection
	case d.Removed():
		return serving.ErrRemoved
	case h.c.client.Superseded(d):
		return errSuperseded
	}
	if session != "" {
		h.c.client.Resume(d)
		if now, err := diskInfoOf(d, h.c.name, session); err != nil || now != h.diskInfo {
			return cmp.Or(err, errAnother)
		}
	}
	return h.c.client.TakeOver(h.c.srv.ctx)
}

// errAnother refuses a disk that has changed since it was described in this handshake.
var errAnother = errors.New("the disk is not in the state that was told a moment ago: ask again")

// flags are the transmission flags of an export.
func (h *handshake) flags(d *serving.Disk) uint16 {
	f := uint16(flagHasFlags | flagSendFlush | flagSendFUA | flagSendZeroes | flagSendCache |
		flagSendFastZero)
	if h.c.certified || h.c.Process != 0 || !d.Exclusive() {
		f |= flagMultiConn // otherwise it is unknown whether two connections are of one client
	}
	if d.Protected() {
		f |= flagReadOnly
	}
	if d.Discards != nil {
		f |= flagSendTrim
	}
	if h.c.structured {
		f |= flagSendDF
	}
	if h.c.extended {
		f |= flagStatusPayloads
	}
	return f
}
