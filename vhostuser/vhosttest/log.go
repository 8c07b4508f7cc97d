package vhosttest

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// LogPage is what one bit of a log stands for, bytes.
const LogPage = 4096

// Log is the log of a migration: a bit for each page of the guest that the back end has written.
type Log struct {
	fd    int
	file  []byte
	words []uint64
}

func newLog(pages uint64) (*Log, error) {
	bytes := (pages/8 + 1 + LogPage - 1) &^ (LogPage - 1)
	fd, err := unix.MemfdCreate("vhosttest-log", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("a log: %w", err)
	}
	l := &Log{fd: fd}
	if err := unix.Ftruncate(fd, int64(bytes)); err != nil {
		l.close()
		return nil, fmt.Errorf("a log: %w", err)
	}
	l.file, err = unix.Mmap(fd, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		l.close()
		return nil, fmt.Errorf("a log: %w", err)
	}
	l.words = unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(l.file))), bytes/8)
	return l, nil
}

func (l *Log) close() {
	if l.file != nil {
		_ = unix.Munmap(l.file)
	}
	_ = unix.Close(l.fd)
}

// share gives the log to the back end, which answers.
func (l *Log) share(c *Conn) error {
	reply, err := c.Ask(SetLogBase, U64(uint64(len(l.file)), 0), l.fd)
	closeAll(reply.FDs)
	return err
}

// StartLog begins to log which pages the back end writes.
func (d *Driver) StartLog() error {
	if d.Protocol&ProtocolLog == 0 || d.Offered&FeatureLogAll == 0 {
		return fmt.Errorf("a log of pages (LOG_SHMFD, VHOST_F_LOG_ALL): %w", ErrUnsupported)
	}
	var end uint64
	for _, r := range d.Memory.Regions() {
		end = max(end, r.Addr+r.Size)
	}
	l, err := newLog(end / LogPage)
	if err != nil {
		return err
	}
	if err := l.share(d.Conn()); err != nil {
		l.close()
		return err
	}
	d.log = l
	return d.setLog()
}

// setLog tells the back end whether to log.
func (d *Driver) setLog() error {
	features := d.Features
	if d.log != nil {
		features |= FeatureLogAll
	}
	if err := d.Conn().Tell(SetFeatures, U64(features)); err != nil {
		return err
	}
	for _, q := range d.queues {
		if err := d.Conn().Tell(SetVringAddr, q.address()); err != nil {
			return err
		}
	}
	return nil
}

// StopLog ends the log.
func (d *Driver) StopLog() error {
	l := d.log
	d.log = nil
	err := d.setLog()
	l.close()
	return err
}

// Dirty returns the addresses in the guest of all pages that were written since the last call.
func (d *Driver) Dirty() (pages []uint64) {
	for i := range d.log.words {
		if atomic.LoadUint64(&d.log.words[i]) == 0 {
			continue
		}
		word := atomic.SwapUint64(&d.log.words[i], 0)
		for bit := range uint64(64) {
			if word>>bit&1 != 0 {
				pages = append(pages, (uint64(i)*64+bit)*LogPage)
			}
		}
	}
	return pages
}
