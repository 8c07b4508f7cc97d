package nbd

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"
	"unicode"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/serving"
)

const (
	// dialTime is how long a server may take until its export can be used.
	dialTime = 30 * time.Second
	// deadTime is after how long without a sign of life from the server's machine a connection is
	// given up. A server may take any time for a request.
	deadTime = 15 * time.Second
)

// errSilent says that the server has accepted the connection, and sent nothing. It may be starting
// or ending, or be unknown to a proxy yet.
var errSilent = errors.New("the server has not said a word")

// greeting is what a server says of an export.
type greeting struct {
	diskInfo
	name  string // the server's for the export; "": unknown
	size  int64  // bytes
	flags uint16
	limit int // the most bytes that a request may carry
	block int // of a logical block, bytes
	// allocation says that BLOCK_STATUS tells what is stored, by allocationID.
	allocation   bool
	allocationID uint32
}

func (g *greeting) readOnly() bool { return g.flags&flagReadOnly != 0 }

// dialer connects to an export, as one session: see RemoteOptions.
type dialer struct {
	RemoteOptions
	session         string
	migrationTarget bool // the target of a live migration: see Remote.Inherit
}

// dial connects to the export.
func (d *dialer) dial(ctx context.Context) (*link, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	network, address := "tcp", d.Address
	if path, ok := strings.CutPrefix(address, serving.SocketPrefix); ok {
		network, address = "unix", path
	}
	nc, err := (&net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true,
		Idle: deadTime / 3, Interval: deadTime / 3, Count: 2}}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	if t, ok := nc.(*net.TCPConn); ok {
		if err := socket.SetUserTimeout(t, deadTime); err != nil {
			_ = nc.Close()
			return nil, err
		}
	}
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
	defer stop()
	n := &negotiation{dialer: d, nc: nc, in: bufio.NewReaderSize(nc, linkBuffer)}
	if err := n.run(ctx); err != nil {
		_ = nc.Close()
		switch {
		case ctx.Err() == nil:
		case errors.Is(err, errSilent):
			err = fmt.Errorf("%w: %w", errSilent, ctx.Err())
		default:
			err = fmt.Errorf("it did not answer in time: %w", ctx.Err())
		}
		return nil, err
	}
	return newLink(n), nil
}

// negotiation is the client's side of a handshake.
type negotiation struct {
	*dialer
	nc net.Conn // in TLS, once that is on
	in *bufio.Reader
	greeting
}

func (n *negotiation) run(ctx context.Context) error {
	var hello [18]byte
	if _, err := io.ReadFull(n.in, hello[:]); err != nil {
		return fmt.Errorf("%w: %w", errSilent, err)
	}
	if binary.BigEndian.Uint64(hello[:]) != magicInit ||
		binary.BigEndian.Uint64(hello[8:]) != magicOption {
		return errors.New("that is no NBD server with options (fixed newstyle)")
	}
	const want = flagFixedNewstyle | flagNoZeroes
	if flags := binary.BigEndian.Uint16(hello[16:]); flags&want != want {
		return fmt.Errorf("the server is too old: its handshake flags are %#x", flags)
	}
	if _, err := n.nc.Write(binary.BigEndian.AppendUint32(nil, want)); err != nil {
		return err
	}
	if n.TLS != nil {
		if err := n.startTLS(ctx); err != nil {
			return err
		}
	}
	if err := n.ask(optStructuredReply, nil, nil); err != nil {
		return err
	}
	if err := n.joinSession(); err != nil {
		return err
	}
	return n.choose()
}

// startTLS turns TLS on. No answer from before is used after it.
func (n *negotiation) startTLS(ctx context.Context) error {
	if err := n.ask(optStartTLS, nil, nil); err != nil {
		return err
	}
	if n.in.Buffered() > 0 {
		return errors.New("data in plain text follows the answer to the request for TLS")
	}
	config, err := n.TLS()
	if err != nil {
		return err
	}
	nc := tls.Client(&records{Conn: n.nc}, config)
	if err := nc.HandshakeContext(ctx); err != nil {
		return fmt.Errorf("TLS: %w", err)
	}
	n.nc, n.in = nc, bufio.NewReaderSize(nc, linkBuffer)
	return nil
}

// joinSession makes the connection one of the session. It fails if the server is not kubevirt-disk.
func (n *negotiation) joinSession() error {
	data := appendText(nil, n.Export)
	queries := []string{sessionContext + n.session}
	if n.migrationTarget {
		queries = append(queries, migrationTargetContext)
	}
	if n.Once {
		queries = append(queries, allocationContext)
	}
	data = binary.BigEndian.AppendUint32(data, uint32(len(queries)))
	for _, q := range queries {
		data = appendText(data, q)
	}
	joined, migrationTarget := false, false
	err := n.ask(optSetMeta, data, func(kind uint32, p []byte) (err error) {
		switch {
		case kind != repMetaContext || len(p) < 4:
			return fmt.Errorf("the server's answer of type %d is not expected", kind)
		case string(p[4:]) == migrationTargetContext:
			migrationTarget = true
			return nil
		case string(p[4:]) == allocationContext && n.Once:
			n.allocation, n.allocationID = true, binary.BigEndian.Uint32(p)
			return nil
		}
		joined = true
		n.diskInfo, err = decodeDiskInfo(string(p[4:]))
		return err
	})
	var refused *refusedOption
	switch {
	case errors.As(err, &refused) && refused.kind == repErrPolicy:
		return fmt.Errorf("%w: %w", errSuperseded, err)
	case err != nil:
		return err
	case !joined:
		return errors.New("the server does not know sessions, which keep late writes of a broken " +
			"connection apart from those of the next: it is no kubevirt-disk, or too old a one")
	case migrationTarget != n.migrationTarget:
		return errors.New("the server is too old for a live migration: update it")
	}
	return nil
}

// choose chooses the export by NBD_OPT_GO, and checks the server's description of it.
func (n *negotiation) choose() error {
	data := appendText(nil, n.Export)
	data = binary.BigEndian.AppendUint16(data, 2)
	data = binary.BigEndian.AppendUint16(data, infoBlockSize)
	data = binary.BigEndian.AppendUint16(data, infoName)
	n.limit, n.block = maxBlock, minBlock
	err := n.ask(optGo, data, func(kind uint32, p []byte) error {
		f := fields{b: p}
		if kind != repInfo {
			return fmt.Errorf("the server's answer of type %d is not expected", kind)
		}
		switch f.u16() {
		case infoExport:
			n.size, n.flags = int64(f.u64()), f.u16()
		case infoBlockSize:
			n.block, _ = int(max(f.u32(), minBlock)), f.u32()
			n.limit = int(min(f.u32(), maxBlock))
		case infoName:
			n.name = string(f.take(uint32(len(f.b))))
		default:
			return nil
		}
		if !f.ended() {
			return errors.New("the server's description of the export has a wrong length")
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case n.size <= 0 || n.size%int64(n.block) != 0:
		return fmt.Errorf("the export has %d bytes; a disk has a multiple of %d", n.size, n.block)
	case n.flags&flagSendFlush == 0 || n.flags&flagSendFUA == 0:
		return errors.New("the server cannot make writes durable (it has no FLUSH or FUA)")
	case n.limit < minBlock || n.limit%disk.SectorSize != 0:
		return fmt.Errorf("the server takes at most %d bytes in a request", n.limit)
	}
	return nil
}

// maxReplies is how many answers a server may give to one option.
const maxReplies = 64

// ask sends an option, and calls f with its answers until the option is acknowledged. f nil: no
// answer is expected.
func (n *negotiation) ask(number uint32, data []byte, f func(kind uint32, p []byte) error) error {
	p := binary.BigEndian.AppendUint64(nil, magicOption)
	p = binary.BigEndian.AppendUint32(p, number)
	p = binary.BigEndian.AppendUint32(p, uint32(len(data)))
	if _, err := n.nc.Write(append(p, data...)); err != nil {
		return err
	}
	for range maxReplies {
		kind, p, err := n.reply(number)
		switch {
		case err != nil:
			return err
		case kind == repAck:
			return nil
		case kind&repErr != 0:
			return refusal(kind, p)
		case f == nil:
			return fmt.Errorf("the server's answer of type %d is not expected", kind)
		}
		if err := f(kind, p); err != nil {
			return err
		}
	}
	return fmt.Errorf("the server answers option %d without an end", number)
}

// reply reads an answer to an option.
func (n *negotiation) reply(number uint32) (kind uint32, p []byte, err error) {
	var head [20]byte
	if _, err := io.ReadFull(n.in, head[:]); err != nil {
		return 0, nil, fmt.Errorf("the server ends the connection: %w", err)
	}
	length := binary.BigEndian.Uint32(head[16:])
	if binary.BigEndian.Uint64(head[:]) != magicReply ||
		binary.BigEndian.Uint32(head[8:]) != number || length > maxOption {
		return 0, nil, errors.New("what the server sends is no answer to an option")
	}
	p = make([]byte, length)
	_, err = io.ReadFull(n.in, p)
	return binary.BigEndian.Uint32(head[12:]), p, err
}

// refusedOption is a server's error for an option.
type refusedOption struct {
	kind uint32
	text string
}

func (e *refusedOption) Error() string { return "the server refuses: " + e.text }

func refusal(kind uint32, p []byte) error {
	text := printable(p)
	switch {
	case text != "":
	case kind == repErrTLSRequired:
		text = "it needs TLS"
	case kind == repErrUnknown:
		text = "there is no such export"
	default:
		text = fmt.Sprintf("error %d", kind&^repErr)
	}
	return &refusedOption{kind, text}
}

// printable is a text from the server for people.
func printable(p []byte) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, string(p[:min(len(p), maxString)]))
}

func appendText(p []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint32(p, uint32(len(s))), s...)
}
