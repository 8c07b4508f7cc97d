package control

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// TestControlObeysItsUserAndRoot asks as different users. A user who is refused changes nothing and
// learns nothing.
func TestControlObeysItsUserAndRoot(t *testing.T) {
	own := uint32(os.Geteuid())
	const open = `{"action": "open", "lun": 2, "to": "` + second + `"}`
	const opened, forbidden = `{"done":"LUN 2 is open to ` + second,
		`{"error":"only the user of the daemon`
	const misread = `{"error":"cannot understand the request`
	user := func(uid uint32) *unix.Ucred { return &unix.Ucred{Uid: uid} }
	for name, c := range map[string]struct {
		peer   any // of the connection
		body   string
		status int
		answer string
	}{
		"the own user":     {user(own), open, http.StatusOK, opened},
		"root":             {user(0), open, http.StatusOK, opened},
		"another user":     {user(own + 1), open, http.StatusForbidden, forbidden},
		"nobody knows who": {nil, open, http.StatusForbidden, forbidden},
		"what is refused": {user(own), `{"action": "finish", "lun": 3}`,
			http.StatusConflict, `{"error":"not handed over"`},
		"no action": {user(own), `{"action": "steal", "lun": 2}`,
			http.StatusConflict, `{"error":"\"steal\" is not an action`},
		"a key of the future": {user(own), open[:len(open)-1] + `, "force": true}`,
			http.StatusBadRequest, misread},
		"no JSON": {user(own), `open`, http.StatusBadRequest, misread},
		"far too much": {user(own), strings.Repeat(" ", 1<<20) + `{}`,
			http.StatusBadRequest, misread},
	} {
		luns := newFakeLUNs()
		core, log := observer.New(zap.InfoLevel)
		request := httptest.NewRequest(http.MethodPost, "/handover", strings.NewReader(c.body))
		if c.peer != nil {
			request = request.WithContext(context.WithValue(request.Context(), peerKey{}, c.peer))
		}
		w := httptest.NewRecorder()
		authorized(newHandovers(luns, zap.New(core)).handle)(w, request)
		require.Equal(t, c.status, w.Code, name)
		require.Contains(t, w.Body.String(), c.answer, name)
		if c.status == http.StatusOK {
			require.Len(t, luns.opened, 1, name)
			said := log.FilterMessage("handover").FilterField(zap.String("action", "open"))
			require.Equal(t, 1, said.Len(), name)
			continue
		}
		require.Empty(t, luns.opened, name)
		require.Empty(t, log.All(), name)
	}
}

// fakeTarget is a target with two sessions.
type fakeTarget struct {
	*fakeLUNs
	sessions []status.Session
	content  *fakeContent
	deleted  chan string // gets the names of deleted snapshots; nil: unused
	made     sync.Map    // names of snapshots, and when they were made, if deleted is used
}

func (f *fakeTarget) Sessions() []status.Session { return f.sessions }

func (f *fakeTarget) EndSessions(which func(status.Session) bool) (ended []status.Session) {
	for _, s := range f.sessions {
		if which(s) {
			ended = append(ended, s)
		}
	}
	return ended
}

func (f *fakeTarget) ListSnapshots(disk string) ([]status.Snapshot, error) {
	if disk == "none" {
		return nil, errors.New("there is no disk none")
	}
	all := []status.Snapshot{{Disk: disk, Name: "s"}}
	for name, at := range f.made.Range {
		all = append(all, status.Snapshot{Disk: disk, Name: name.(string), Created: at.(time.Time)})
	}
	return all, nil
}

func (f *fakeTarget) ChangeSnapshots(_ context.Context, r status.SnapshotRequest) (string, error) {
	if r.Disks[0] == "none" {
		return "", errors.New("there is no disk none")
	}
	switch {
	case f.deleted == nil:
	case r.Action == status.SnapshotCreate:
		f.made.Store(r.Name, time.Now())
	case r.Action == status.SnapshotDelete:
		f.deleted <- r.Name
	}
	return fmt.Sprintf("%s %s of %v", r.Action, r.Name, r.Disks), nil
}

// TestClientAndServer asks and answers through a socket. Closing the server removes it.
func TestClientAndServer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "made", "control.sock")
	luns := &fakeTarget{fakeLUNs: newFakeLUNs(), sessions: []status.Session{
		{TSIH: 1, Initiator: second}, {TSIH: 2, Initiator: "iqn.x"},
		{Initiator: "cert:vm"}, {Initiator: "cert:VM"},
	}}
	s := New(nil, zap.NewNop())
	s.Begin(luns, luns, luns)
	require.NoError(t, s.Listen(path))
	c := Client{Socket: path}
	done := testtool.Must(c.Handover(t.Context(),
		status.Handover{Action: status.ActionOpen, LUN: 2, To: second}))(t)
	require.Contains(t, done, "LUN 2 is open to "+second)
	_, err := c.Handover(t.Context(), status.Handover{Action: status.ActionFinish, LUN: 3})
	var refused *RefusedError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, "not handed over", refused.Reason)

	require.Equal(t, luns.sessions, testtool.Must(c.Sessions(t.Context()))(t))
	ended, err := c.Kick(t.Context(), status.Kick{Initiator: strings.ToUpper(second)})
	require.NoError(t, err)
	require.Equal(t, luns.sessions[:1], ended)
	ended, err = c.Kick(t.Context(), status.Kick{Initiator: "cert:vm"})
	require.NoError(t, err)
	require.Equal(t, luns.sessions[2:3], ended, "another certificate's")
	for _, req := range []status.Kick{{Session: 3}, {}, {Session: 1, Initiator: second}} {
		require.ErrorAs(t, testtool.Err(c.Kick(t.Context(), req)), &refused, "%v", req)
	}

	snapshots := testtool.Must(c.Snapshots(t.Context(), "a b&c"))(t)
	require.Equal(t, []status.Snapshot{{Disk: "a b&c", Name: "s"}}, snapshots)
	require.ErrorAs(t, testtool.Err(c.Snapshots(t.Context(), "none")), &refused)
	require.Equal(t, "there is no disk none", refused.Reason)
	done, err = c.Snapshot(t.Context(), status.SnapshotRequest{Action: status.SnapshotCreate,
		Disks: []string{"1", "2"}, Name: "s"})
	require.NoError(t, err)
	require.Equal(t, "create s of [1 2]", done)
	many := slices.Repeat([]string{strings.Repeat("x", 63)}, 100)
	done, err = c.Snapshot(t.Context(), status.SnapshotRequest{Action: status.SnapshotCreate,
		Disks: many, Name: "s"})
	require.NoError(t, err)
	require.Contains(t, done, "create s of [xxx")
	for said, req := range map[string]status.SnapshotRequest{
		"name a disk":           {Action: status.SnapshotCreate, Name: "s"},
		"delete takes one disk": {Action: status.SnapshotDelete, Disks: []string{"1", "2"}},
		"there is no disk none": {Action: status.SnapshotDelete, Disks: []string{"none"}},
	} {
		require.ErrorAs(t, testtool.Err(c.Snapshot(t.Context(), req)), &refused)
		require.Contains(t, refused.Reason, said)
	}
	s.Close()
	require.NoFileExists(t, path)
	require.ErrorIs(t, testtool.Err(c.Sessions(t.Context())), fs.ErrNotExist)
}

// TestLUNsThatComeAndGo removes and adds LUNs. The timer of a handover stops with its LUN and does
// not hand over the next disk with that number. The next disk's own handover goes on if it was
// open.
func TestLUNsThatComeAndGo(t *testing.T) {
	luns := &fakeTarget{fakeLUNs: newFakeLUNs()}
	core, log := observer.New(zap.InfoLevel)
	s := New(nil, zap.New(core))
	s.Begin(luns, luns, luns)
	defer s.Close()
	require.NoError(t, testtool.Err(s.handovers.do(t.Context(), openFor(2, time.Hour))))
	former := s.handovers.openings[2]
	luns.opened, luns.broken = nil, errors.New("there is no LUN 2")
	s.Removed(2)
	require.Empty(t, s.handovers.openings)

	// A timer that had already fired does not try again either.
	s.handovers.openings[2] = former
	s.handovers.expire(2, former)
	require.Empty(t, s.handovers.openings)
	require.Empty(t, log.TakeAll())

	until := time.Now().Add(time.Hour)
	luns.opened = []serving.Opening{
		{LUN: 2, To: second, Until: until}, {LUN: 3, To: second, Until: until},
	}
	s.Added(2)
	require.Contains(t, s.handovers.openings, uint16(2))
	require.NotContains(t, s.handovers.openings, uint16(3))
}

// TestPagesOfOtherSites: if something hands requests of browsers to the socket, a page of another
// site still ends no session.
func TestPagesOfOtherSites(t *testing.T) {
	luns := &fakeTarget{fakeLUNs: newFakeLUNs(), sessions: []status.Session{{TSIH: 1}}}
	s := New(nil, zap.NewNop())
	s.Begin(luns, luns, luns)
	defer s.Close()
	for site, want := range map[string]int{"cross-site": http.StatusForbidden,
		"same-origin": http.StatusOK} {
		r := httptest.NewRequest(http.MethodPost, status.PathKick, strings.NewReader(
			`{"session": 1}`))
		r.Header.Set("Sec-Fetch-Site", site)
		peer := &unix.Ucred{Uid: uint32(os.Geteuid())}
		w := httptest.NewRecorder()
		s.http.Handler.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), peerKey{}, peer)))
		require.Equal(t, want, w.Code, site)
	}
}

// TestHandoverWithoutAnAnswer asks a daemon that waits for its disk.
func TestHandoverWithoutAnAnswer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	l := testtool.Must(socket.ListenUnix(path))(t)
	defer l.Close()
	ctx, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	_, err := Client{Socket: path}.Handover(ctx, status.Handover{})
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestHandoverOfAnotherContainersDaemon(t *testing.T) {
	machine, container := Client{}, Client{OwnIsInit: true}
	require.NoError(t, container.checkDaemon(&unix.Ucred{Pid: 1}), "its own")
	require.NoError(t, machine.checkDaemon(&unix.Ucred{Pid: 0}),
		"of a container without a daemon, to control one")
	require.NoError(t, machine.checkDaemon(&unix.Ucred{Pid: 77}), "on a machine")
	require.NoError(t, container.checkDaemon(nil), "the kernel does not tell")
	for _, pid := range []int32{0, 77} {
		require.ErrorIs(t, container.checkDaemon(&unix.Ucred{Pid: pid}), ErrStranger)
	}

	path := filepath.Join(t.TempDir(), "control.sock")
	l := testtool.Must(socket.ListenUnix(path))(t)
	defer l.Close()
	c := testtool.Must(net.Dial("unix", path))(t)
	defer c.Close()
	require.EqualValues(t, os.Getpid(), socket.Peer(c).Pid, "the listener, seen from the client")
	_, err := Client{Socket: path, OwnIsInit: true}.Sessions(t.Context())
	require.ErrorIs(t, err, ErrStranger, "the test is not the first process of its container")
}

// TestHandoverAsksSomethingElse asks a server that is not a daemon of this program.
func TestHandoverAsksSomethingElse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	l := testtool.Must(socket.ListenUnix(path))(t)
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	require.NoError(t, server.Listener.Close())
	server.Listener = l
	server.Start()
	defer server.Close()
	_, err := Client{Socket: path}.Handover(t.Context(), status.Handover{})
	require.ErrorIs(t, err, ErrUnknown)
}

// fakeContent is a snapshot of which each second block is stored, and each third one has changed.
// Its bytes are the numbers of the blocks.
type fakeContent struct {
	disk.Disk
	away int // so many reads come too early
	gone bool
}

const fakeBlock, fakeBlocks = 4096, 20000

func (f *fakeContent) Size() int64  { return fakeBlock * fakeBlocks }
func (f *fakeContent) Close() error { return nil }

func (f *fakeContent) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if f.away > 0 {
		f.away--
		return 0, disk.ErrNotNow
	}
	for i := range p {
		p[i] = byte((off + int64(i)) / fakeBlock)
	}
	return len(p), nil
}

func (f *fakeContent) Extent(ctx context.Context, off, length int64) (disk.Extent, error) {
	return disk.Extent{Length: min(length, fakeBlock), Data: off/fakeBlock%2 == 1}, nil
}

func (f *fakeContent) Since() []disk.Snapshot {
	return []disk.Snapshot{{Name: "monday", ID: "monday"}}
}

func (f *fakeContent) Changed(_ context.Context, since string, off, length int64) (bool,
	int64, error,
) {
	if since != "monday" {
		return false, 0, errors.New("there is no " + since)
	}
	return off/fakeBlock%3 == 0, min(length, fakeBlock), nil
}

func (f *fakeTarget) OpenContent(disk, snapshot string) (*Content, error) {
	if disk == "none" {
		return nil, errors.New("there is no disk none")
	}
	identity := snapshot
	if f.content.gone {
		identity = "another"
	}
	return &Content{Disk: f.content, Described: status.Content{Disk: disk, Identity: identity,
		Size: f.content.Size(), Image: []string{"sha256:0"}}}, nil
}

// TestOwnSnapshot: a snapshot that a process has made for itself goes when the process is killed.
func TestOwnSnapshot(t *testing.T) {
	process := exec.Command("sleep", "inf")
	require.NoError(t, process.Start())
	luns := &fakeTarget{deleted: make(chan string)}
	c := &snapshotControl{luns, zap.NewNop()}
	make := func(name string) {
		r := httptest.NewRequest(http.MethodPost, status.PathSnapshots+"?"+whileAlive,
			strings.NewReader(`{"action": "create", "disks": ["vm"], "name": "`+name+`"}`))
		peer := &unix.Ucred{Pid: int32(process.Process.Pid)}
		w := httptest.NewRecorder()
		c.change(w, r.WithContext(context.WithValue(r.Context(), peerKey{}, peer)), 0)
		require.Equal(t, http.StatusOK, w.Code, w.Body)
	}
	make("one")
	select {
	case <-luns.deleted:
		t.Fatal("the process is there")
	default:
	}
	require.NoError(t, process.Process.Kill())
	require.Error(t, process.Wait())
	require.Equal(t, "one", <-luns.deleted)
	make("killed meanwhile")
	require.Equal(t, "killed meanwhile", <-luns.deleted)
	// One that has the name since another time is another one, and stays.
	c.deleteAfter(-1, status.SnapshotRequest{Disks: []string{"vm"}, Name: "one"}, time.Now())
}

// TestReader reads a snapshot through a socket, with more ranges than a page has.
func TestReader(t *testing.T) {
	content := &fakeContent{away: 1}
	luns := &fakeTarget{fakeLUNs: newFakeLUNs(), content: content}
	s := New(nil, zap.NewNop())
	s.Begin(luns, luns, luns)
	path := filepath.Join(t.TempDir(), "control.sock")
	require.NoError(t, s.Listen(path))
	defer s.Close()
	c := Client{Socket: path}
	explain := func(err error) error { return fmt.Errorf("explained: %w", err) }
	_, err := c.Reader(t.Context(), "none", "s", explain)
	require.EqualError(t, err, "explained: there is no disk none")
	r := testtool.Must(c.Reader(t.Context(), "vm", "s", explain))(t)
	defer r.Close()
	require.Equal(t, status.Content{Disk: "vm", Identity: "s", Size: content.Size(),
		Image: []string{"sha256:0"}}, r.Content)

	want, got := make([]byte, 3*status.MaxContentBytes/2), make([]byte, 3*status.MaxContentBytes/2)
	content.away = 0
	_, _ = content.ReadAt(t.Context(), want, 512)
	content.away = 1 // it is asked again
	require.NoError(t, testtool.Err(r.ReadAt(t.Context(), got, 512)))
	require.True(t, bytes.Equal(want, got))

	for block := range int64(fakeBlocks - 3) {
		e := testtool.Must(r.Extent(t.Context(), block*fakeBlock, fakeBlock))(t)
		require.Equal(t, disk.Extent{Data: block%2 == 1, Length: fakeBlock}, e)
		in, n, err := disk.Changed(t.Context(), r, "monday", block*fakeBlock+512, 2*fakeBlock)
		require.NoError(t, err)
		if block%3 == 0 {
			require.Equal(t, fmt.Sprint(true, fakeBlock-512), fmt.Sprint(in, n))
		} else {
			require.False(t, in)
			require.LessOrEqual(t, n, int64(3-block%3)*fakeBlock-512)
		}
	}
	_, _, err = disk.Changed(t.Context(), r, "tuesday", 0, 512)
	require.ErrorContains(t, err, "there is no tuesday")
	depth, n, err := r.Depth(t.Context(), 512, content.Size()-512)
	require.NoError(t, err, "what an image has not is the disk's own")
	require.Equal(t, fmt.Sprint(disk.DepthOwn, content.Size()-512), fmt.Sprint(depth, n))

	for what, bad := range map[string]string{
		"&offset=0&length=0": "no bytes", "&offset=-1&length=512": "no bytes",
		"&offset=81919999&length=512": "no bytes", "&offset=0&length=9999999": "no bytes",
	} {
		var refused *RefusedError
		err := askBy(t.Context(), r.by, "GET", status.PathContentBytes+"?disk=vm"+what, nil, nil)
		require.ErrorAs(t, err, &refused, what)
		require.Contains(t, refused.Reason, bad)
	}
	_, err = r.ReadAt(disk.AtHand, got[:512], 0)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, disk.ErrNotNow)
	content.gone = true
	_, err = r.ReadAt(t.Context(), got[:512], 0)
	require.ErrorContains(t, err, "is another one than before")
}
