package nbd

import (
	"crypto/tls"
	"net"
	"sync"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/socket"
)

// records is the connection below TLS. crypto/tls makes a system call for each record of 16 KiB,
// and each wakes the peer. So the records of one call of Writev are sent together, if there is
// memory.
type records struct {
	net.Conn

	mu  sync.Mutex
	out *memory.Buffer // guarded by mu; nil: every record is sent at once
	n   int            // guarded by mu; how many bytes of out are not sent yet
}

const (
	// maxRecord is larger than any record, in bytes, with its header and the cipher's overhead (RFC
	// 8446 5.2).
	maxRecord = 16<<10 + 512
	// sentTogether is the fill from which the buffer is sent: another record always fits below it.
	sentTogether = 128<<10 - maxRecord
)

func (r *records) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.out == nil {
		return r.Conn.Write(p)
	}
	for rest := p; len(rest) > 0; {
		m := copy(r.out.B[r.n:], rest)
		rest = rest[m:]
		if r.n += m; r.n >= sentTogether {
			if err := r.sendLocked(); err != nil {
				return 0, err
			}
		}
	}
	return len(p), nil
}

func (r *records) sendLocked() error {
	p := r.out.B[:r.n]
	r.n = 0
	if len(p) == 0 {
		return nil
	}
	_, err := r.Conn.Write(p)
	return err
}

// cork keeps what is written in out, until uncork. out is nil if there is no memory for it.
func (r *records) cork(out *memory.Buffer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.out, r.n = out, 0
}

// uncork sends what cork has kept.
func (r *records) uncork() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.out == nil {
		return nil
	}
	err := r.sendLocked()
	r.out.Release()
	r.out = nil
	return err
}

// lender lends memory.
type lender interface {
	Get(n int) *memory.Buffer // nil: there is none now
}

// tlsWire gathers parts of output, so that small ones share a TLS record. It has memory for that
// only during a call of Writev.
type tlsWire struct {
	socket.Plain
	records *records
	pool    lender
}

// newTLSWire makes the wire of a connection whose handshake is done.
func newTLSWire(nc *tls.Conn, pool lender) *tlsWire {
	return &tlsWire{socket.Plain{Conn: nc}, nc.NetConn().(*records), pool}
}

// Close implements net.Conn. It does not wait for a peer that takes nothing.
func (w *tlsWire) Close() error {
	if !w.records.mu.TryLock() {
		return w.records.Conn.Close()
	}
	w.records.mu.Unlock()
	return w.Conn.Close()
}

// tlsGather is how many bytes of small parts go out together; a TLS record has at most 16 KiB.
const tlsGather = 64 << 10

// Writev implements socket.Wire.
func (w *tlsWire) Writev(data [][]byte) error {
	w.records.cork(w.pool.Get(sentTogether + maxRecord))
	err := w.write(data)
	if serr := w.records.uncork(); err == nil {
		err = serr
	}
	return err
}

func (w *tlsWire) write(data [][]byte) error {
	small := w.pool.Get(tlsGather)
	defer small.Release()
	var out []byte // what is gathered
	if small != nil {
		out = small.B[:0]
	}
	for _, p := range data {
		if len(out)+len(p) > cap(out) && len(out) > 0 {
			if _, err := w.Write(out); err != nil {
				return err
			}
			out = out[:0]
		}
		if len(p) > cap(out) {
			if _, err := w.Write(p); err != nil {
				return err
			}
			continue
		}
		out = append(out, p...)
	}
	if len(out) == 0 {
		return nil
	}
	_, err := w.Write(out)
	return err
}
