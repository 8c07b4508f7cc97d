package vhostuser

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// Options are those of a Server.
type Options struct {
	Disks *serving.Disks
	Log   *zap.Logger // nil: no log
	// Dir is the directory of the sockets, one for each disk.
	Dir string
	// ClientDir is the path of that directory for clients. "": Dir.
	ClientDir string
	// UIDs are the users who may connect, in addition to this process's user and root.
	UIDs []uint32
	// Crowd limits the connections.
	Crowd serving.Crowd
	// ReconnectDelay is the longest delay of a client whose connections have failed several times
	// within the last minute. Default 2 s; less than 0: there is none.
	ReconnectDelay time.Duration
}

// Server serves disks by vhost-user-blk. Any number of goroutines may call the methods.
type Server struct {
	disks *serving.Disks
	log   *zap.Logger
	dir   string
	// clientDir is Options.ClientDir
	clientDir string
	uids      []uint32
	conns     *serving.Connections[*conn]
	// stopTimeout is the constant stopTimeout, and shorter in tests
	stopTimeout time.Duration

	naming  sync.Mutex // held while a socket is made or removed: no other one takes its name
	mu      sync.Mutex
	exports map[*serving.Disk]*export // guarded by mu
}

// export is a disk with its socket.
type export struct {
	disk   *serving.Disk
	l      net.Listener
	export string // the name of the socket, without .sock
	path   string
	name   string // name of the clients: serving.SocketPrefix and the path

	mu   sync.Mutex
	conn *conn // guarded by mu; the connection that uses the disk, or nil
}

// New makes a server, and adds it as a front end of the disks. There must be no disk yet.
func New(opt Options) (*Server, error) {
	s := &Server{disks: opt.Disks, log: opt.Log, dir: opt.Dir, uids: opt.UIDs,
		clientDir: cmp.Or(opt.ClientDir, opt.Dir), stopTimeout: stopTimeout,
		exports: map[*serving.Disk]*export{}}
	s.log = cmp.Or(s.log, zap.NewNop())
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		return nil, errors.New("vhost-user: rings are read on little-endian machines only")
	}
	s.conns = serving.NewConnections[*conn](serving.Rules{Disks: opt.Disks, Log: s.log,
		Crowd: opt.Crowd, Delay: cmp.Or(opt.ReconnectDelay, 2*time.Second), Every: time.Minute,
		Gated: true})
	if !serving.ValidName(serving.SocketPrefix + filepath.Join(s.dir, "x.sock")) {
		return nil, fmt.Errorf("vhost-user: the directory %q is a part of the names of clients, "+
			"so it must be short and without spaces: name another one", s.dir)
	}
	if err := s.disks.Serve(front{Server: s}); err != nil {
		return nil, fmt.Errorf("vhost-user: %w", err)
	}
	return s, nil
}

func (s *Server) end(which func(*conn) bool, err error) {
	for _, c := range s.conns.All(which) {
		c.fail(err)
	}
}

// socketName is the name of a disk's socket, without .sock: the disk's name. It is the disk's
// number if another disk has that name, if the name is a number, if no socket can have it, or if
// clients could not connect because the path is too long.
func (s *Server) socketName(d *serving.Disk) string {
	name := d.Name
	_, err := strconv.Atoi(name)
	if err == nil || name == "" || strings.ContainsAny(name, "/\\") ||
		strings.HasPrefix(name, ".") ||
		len(filepath.Join(s.clientDir, name+".sock")) > socket.MaxAddress ||
		!serving.ValidName(serving.SocketPrefix+filepath.Join(s.dir, name+".sock")) {
		return strconv.Itoa(int(d.Number))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, other := range s.exports {
		if other.export == name {
			return strconv.Itoa(int(d.Number))
		}
	}
	return name
}

// add makes the socket of a disk.
func (s *Server) add(d *serving.Disk) error {
	s.naming.Lock()
	defer s.naming.Unlock()
	name := s.socketName(d)
	path := filepath.Join(s.dir, name+".sock")
	l, err := socket.ListenUnix(path)
	if err != nil {
		return fmt.Errorf("vhost-user socket %q: %w", path, err)
	}
	e := &export{disk: d, l: l, export: name, path: path, name: serving.SocketPrefix + path}
	s.mu.Lock()
	s.exports[d] = e
	s.mu.Unlock()
	go func() {
		err := s.conns.Accept(l, func(nc net.Conn) *conn { return s.newConn(nc, e) })
		if !errors.Is(err, serving.ErrClosed) && !errors.Is(err, net.ErrClosed) {
			s.log.Error("a vhost-user socket takes no clients any more",
				zap.String("socket", path), zap.Error(err))
		}
	}()
	return nil
}

// remove removes the socket of a disk, if it has one.
func (s *Server) remove(d *serving.Disk) {
	s.naming.Lock()
	defer s.naming.Unlock()
	s.mu.Lock()
	e := s.exports[d]
	delete(s.exports, d)
	s.mu.Unlock()
	if e != nil {
		_ = e.l.Close()
	}
}

// takeTimeout is how long a client waits for the end of the former one, which may not have been
// noticed.
const takeTimeout = 500 * time.Millisecond

// take lets a connection use the export.
func (e *export) take(c *conn) error {
	for timeout := time.After(takeTimeout); ; {
		e.mu.Lock()
		former := e.conn
		if former == nil {
			e.conn = c
		}
		e.mu.Unlock()
		if former == nil {
			return nil
		}
		select {
		case <-former.gone:
		case <-timeout:
			return errBusy
		}
	}
}

// leave lets another connection use the export.
func (e *export) leave(c *conn) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.conn == c {
		e.conn = nil
		close(c.gone)
	}
}

// Socket is the path of a disk's socket, by its number; "": there is none.
func (s *Server) Socket(number uint16) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for d, e := range s.exports {
		if d.Number == number && !d.Removed() {
			return e.path
		}
	}
	return ""
}

// Sessions returns the connections, the oldest one first.
func (s *Server) Sessions() []status.Session { return s.conns.Sessions() }

// EndSessions is serving.Connections.Kick.
func (s *Server) EndSessions(which func(status.Session) bool) []status.Session {
	return s.conns.Kick(which)
}

// Shutdown refuses new clients, ends the connections, and waits for requests under way. Requests
// that wait for far content are given up; the front end has them in its region of requests in
// flight, and gives them to the next daemon. If the context ends first, Shutdown returns its error.
func (s *Server) Shutdown(ctx context.Context) error {
	s.conns.Close()
	s.end(func(*conn) bool { return true }, serving.ErrClosed)
	return s.conns.Finish(ctx)
}

// front is the server as a front end of the disks in use.
type front struct {
	*Server
	serving.NoRights
}

func (f front) Added(d *serving.Disk) error { return f.add(d) }

// Removed implements serving.Front: the socket is removed, and its connection ends.
func (f front) Removed(d *serving.Disk) {
	f.remove(d)
	f.end(func(c *conn) bool { return c.disk == d }, serving.ErrRemoved)
}

// Resized implements serving.Front: guests see it at once.
func (f front) Resized(d *serving.Disk) {
	for _, c := range f.conns.All(func(c *conn) bool { return c.disk == d }) {
		c.resized()
	}
}

// Protected implements serving.Front. Writes are refused from now on. A guest learns of it when it
// starts again: the protocol has no message for that.
func (f front) Protected(*serving.Disk) {}

func (f front) Shared(*serving.Disk) {}

// Fence implements serving.Front: requests that wait for far content are given up.
func (f front) Fence(d *serving.Disk, fenced func(string) bool) (serving.Fencing, error) {
	return serving.FenceBy(func() {
		for _, c := range f.conns.All(func(c *conn) bool {
			return c.disk == d && fenced(c.at.name)
		}) {
			c.giveUp(nil)
		}
	}), nil
}
