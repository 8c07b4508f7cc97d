package nbd

import (
	"crypto/tls"
	"net"
	"sync"

	"kubevirt.io/disk/internal/socket"
)

// records is the connection below TLS. crypto/tls makes a system call for each record of 16 KiB,
// and each wakes the peer. So those of one call of Writev are sent together.
type records struct {
	net.Conn

	mu  sync.Mutex
	out *[]byte // guarded by mu; what is not sent yet; nil: everything is sent at once
}

// sentTogether is how many bytes of records are sent together.
const sentTogether = 128 << 10

// outs has memory for records, with place for one more.
var outs = sync.Pool{New: func() any {
	b := make([]byte, 0, sentTogether+32<<10)
	return &b
}}

func (r *records) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.out == nil {
		return r.Conn.Write(p)
	}
	if *r.out = append(*r.out, p...); len(*r.out) < sentTogether {
		return len(p), nil
	}
	return len(p), r.sendLocked()
}

func (r *records) sendLocked() error {
	p := *r.out
	*r.out = p[:0]
	if len(p) == 0 {
		return nil
	}
	_, err := r.Conn.Write(p)
	return err
}

// hold keeps what is written, until send.
func (r *records) hold() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.out = outs.Get().(*[]byte)
}

// send sends what was kept.
func (r *records) send() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := r.sendLocked()
	outs.Put(r.out)
	r.out = nil
	return err
}

// tlsWire gathers what goes out, so that small parts share a TLS record.
type tlsWire struct {
	socket.Plain
	records *records
	out     []byte
}

// newTLSWire is for a connection whose handshake is done.
func newTLSWire(nc *tls.Conn) *tlsWire {
	return &tlsWire{Plain: socket.Plain{Conn: nc}, records: nc.NetConn().(*records)}
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
	w.records.hold()
	err := w.write(data)
	if serr := w.records.send(); err == nil {
		err = serr
	}
	return err
}

func (w *tlsWire) write(data [][]byte) error {
	w.out = w.out[:0]
	for _, p := range data {
		if len(w.out)+len(p) > tlsGather && len(w.out) > 0 {
			if _, err := w.Write(w.out); err != nil {
				return err
			}
			w.out = w.out[:0]
		}
		if len(p) > tlsGather {
			if _, err := w.Write(p); err != nil {
				return err
			}
			continue
		}
		w.out = append(w.out, p...)
	}
	if len(w.out) == 0 {
		return nil
	}
	_, err := w.Write(w.out)
	return err
}

// Trim implements socket.Wire.
func (w *tlsWire) Trim() { w.out = nil }
