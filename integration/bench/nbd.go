package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

// nbdClient is the load generator for NBD servers, for reads only, as cheap as the initiator for
// iSCSI targets. It negotiates the default export in the fixed newstyle and takes simple replies.
type nbdClient struct {
	*wire
	addresses
	flying int
	done   uint64
}

// nbdScheme is the URL of a server on a Unix socket, up to the path.
const nbdScheme = "nbd+unix:///?socket="

const (
	// "NBDMAGIC", "IHAVEOPT"
	nbdMagic, nbdOption                 = 0x4e42444d41474943, 0x49484156454f5054
	nbdFixedNewstyle, nbdNoZeroes       = 1, 2 // handshake flags
	nbdExportName                       = 1    // option
	nbdRequestMagic, nbdReplyMagic      = 0x25609513, 0x67446698
	nbdGreeting, nbdExport, nbdReplyLen = 18, 10, 16
)

// newNBDClient connects to a server on a Unix socket. The size of its export must match the load.
func newNBDClient(socket string, l generatorLoad, timeout time.Duration) (*nbdClient, error) {
	if l.write || l.digests || l.luns != 1 {
		return nil, fmt.Errorf("%s: the NBD client only reads, and only one disk", l)
	}
	nc, err := net.Dial("unix", socket)
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	size, err := negotiateNBD(nc)
	if err != nil {
		return nil, fmt.Errorf("negotiate with the NBD server on %s: %w", socket, err)
	}
	if size != uint64(l.size) {
		return nil, fmt.Errorf("the NBD server on %s exports %d bytes, but %d are expected", socket,
			size, l.size)
	}
	w, err := newWire(nc, timeout)
	if err != nil {
		return nil, err
	}
	return &nbdClient{wire: w, addresses: addresses{l: l, random: 1}}, nil
}

// negotiateNBD returns the size of the default export, in bytes.
func negotiateNBD(nc net.Conn) (size uint64, err error) {
	if err := nc.SetDeadline(time.Now().Add(loginTimeout)); err != nil {
		return 0, err
	}
	var b [nbdGreeting]byte
	if _, err := io.ReadFull(nc, b[:]); err != nil {
		return 0, err
	}
	flags := binary.BigEndian.Uint16(b[16:])
	if binary.BigEndian.Uint64(b[:]) != nbdMagic || binary.BigEndian.Uint64(b[8:]) != nbdOption ||
		flags&nbdFixedNewstyle == 0 || flags&nbdNoZeroes == 0 {
		return 0, errors.New("it does not offer the fixed newstyle negotiation without zeroes")
	}
	answer := binary.BigEndian.AppendUint32(nil, nbdFixedNewstyle|nbdNoZeroes)
	answer = binary.BigEndian.AppendUint64(answer, nbdOption)
	answer = binary.BigEndian.AppendUint32(answer, nbdExportName)
	answer = binary.BigEndian.AppendUint32(answer, 0) // the length of the name
	if _, err := nc.Write(answer); err != nil {
		return 0, err
	}
	if _, err := io.ReadFull(nc, b[:nbdExport]); err != nil {
		return 0, fmt.Errorf("the default export: %w", err)
	}
	return binary.BigEndian.Uint64(b[:]), nil
}

// run works like the initiator's.
func (n *nbdClient) run(stop func() bool) (uint64, error) {
	for {
		for n.flying < n.l.depth && (!stop() || n.done == 0 && n.flying == 0) {
			n.command()
		}
		if n.flying == 0 && n.skip == 0 { // the data of the last reply has arrived, too
			return n.done, nil
		}
		if err := n.flush(); err != nil {
			return 0, err
		}
		if err := n.receive(nbdReplyLen, n.handle); err != nil {
			return 0, err
		}
	}
}

// command queues the next NBD_CMD_READ. Its cookie is the address.
func (n *nbdClient) command() {
	_, offset := n.next()
	n.out = binary.BigEndian.AppendUint32(n.out, nbdRequestMagic)
	n.out = binary.BigEndian.AppendUint32(n.out, 0) // no flags, NBD_CMD_READ
	n.out = binary.BigEndian.AppendUint64(n.out, uint64(offset))
	n.out = binary.BigEndian.AppendUint64(n.out, uint64(offset))
	n.out = binary.BigEndian.AppendUint32(n.out, uint32(n.l.bytes))
	n.flying++
}

func (n *nbdClient) handle(h []byte) (drop int, err error) {
	if magic := binary.BigEndian.Uint32(h); magic != nbdReplyMagic {
		return 0, fmt.Errorf("the server sent a reply that begins with %#x", magic)
	}
	if code := binary.BigEndian.Uint32(h[4:]); code != 0 {
		return 0, fmt.Errorf("a read at %d ended with error %d", binary.BigEndian.Uint64(h[8:]),
			code)
	}
	n.flying--
	n.done++
	return n.l.bytes, nil
}
