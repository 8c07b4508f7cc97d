package upload

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/internal/testtool"
)

// TestExpire: an upload that nobody continues is given up. Others are not, whether they wait in
// files or in memory.
func TestExpire(t *testing.T) {
	s := newServer(t)
	s.volumes.add(t, "vm", 0)
	plain, packed := rawDisk(1<<20), packtest.Xz(rawDisk(1<<20))
	var names []string
	at := map[string]string{}
	for name, data := range map[string][]byte{"vm": plain, "plain": plain, "plain-old": plain,
		"packed": packed, "packed-old": packed} {
		at[name] = s.create(t, name, int64(len(data)))
		requireSays(t, s.append(t, at[name], 0, data[:5000], false), http.StatusNoContent)
		names = append(names, name)
	}
	names = append(names, "none")
	require.NoError(t, s.handler.Expire(t.Context(), names))
	require.Len(t, s.volumes.all, 5)
	for _, name := range []string{"vm", "plain-old", "packed-old"} {
		s.age(t, name)
	}
	require.NoError(t, s.handler.Expire(t.Context(), names))
	s.requireEmpty(t, "vm")
	s.requireNone(t, "plain-old")
	s.requireNone(t, "packed-old")
	for name, data := range map[string][]byte{"plain": plain, "packed": packed} {
		requireSays(t, s.append(t, at[name], 5000, data[5000:], true), http.StatusCreated)
		requireSays(t, s.append(t, at[name+"-old"], 5000, data[5000:], true), http.StatusNotFound)
	}
}

// age makes an upload just too old.
func (s *server) age(t *testing.T, name string) {
	t.Helper()
	disk := filepath.Join(s.volumes.dir, name, diskName)
	rec, err := loadRecord(disk)
	require.NoError(t, err, fmt.Sprint(s.files(t, name)))
	rec.Touched = rec.Touched.Add(-maxAge)
	require.NoError(t, rec.save(disk))
	s.handler.slots.mu.Lock()
	defer s.handler.slots.mu.Unlock()
	if one := s.handler.slots.all[name]; one != nil && one.paused != nil {
		one.paused.base.Touched = one.paused.base.Touched.Add(-maxAge)
	}
}

// TestAnswersHaveTheirOwnTime: how long the answer to an earlier request of the connection could
// take says nothing about the next one.
func TestAnswersHaveTheirOwnTime(t *testing.T) {
	s := newServer(t)
	at := s.create(t, "vm", 4096)
	late := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).SetWriteDeadline(time.Unix(1, 0))
		s.Handler.ServeHTTP(w, r)
	}))
	defer late.Close()
	s.URL = late.URL
	require.Zero(t, s.offset(t, at))
	require.Equal(t, http.StatusNoContent, s.ask(t, http.MethodDelete, at, nil).status)
}

// TestDeletedBeforeARequest: a request for an upload that waits in memory has its slot when the
// volume is deleted, and finds that it is gone. Then nothing of the upload stays in memory.
func TestDeletedBeforeARequest(t *testing.T) {
	s := newServer(t)
	data := packtest.Xz(rawDisk(1 << 20))
	at := s.create(t, "vm", int64(len(data)))
	requireSays(t, s.append(t, at, 0, data[:5000], false), http.StatusNoContent)
	fill := s.handler.opt.Fill
	s.handler.opt.Fill = func(ctx context.Context, name string, make bool) (Volume, bool, error) {
		s.volumes.mu.Lock()
		delete(s.volumes.all, name)
		s.volumes.mu.Unlock()
		s.handler.Forget(name)
		return fill(ctx, name, make)
	}
	requireSays(t, s.append(t, at, 5000, data[5000:], true), http.StatusNotFound)
	testtool.Eventually(t, func() bool {
		s.handler.slots.mu.Lock()
		defer s.handler.slots.mu.Unlock()
		return len(s.handler.slots.all) == 0
	})
}

// TestInterruptedConnectionEnds: net/http ends the context of all later requests of a connection of
// which it could not read, so no client may go on with that one.
func TestInterruptedConnectionEnds(t *testing.T) {
	s := newServer(t)
	v := s.volumes.add(t, "vm", 0)
	data := rawDisk(8 << 10)
	c := s.begin(t, http.MethodPut, "/volume/vm/data", data[:5000], len(data))
	s.waitFor(t, 5000)
	running := s.handler.slots.running()[0]
	v.end()
	testtool.Eventually(t, func() bool {
		running.mu.Lock()
		defer running.mu.Unlock()
		return running.cut
	})
	require.NoError(t, testtool.Err(c.Write(data[5000:])))
	answer := testtool.Must(http.ReadResponse(bufio.NewReader(c), nil))(t)
	require.Equal(t, http.StatusServiceUnavailable, answer.StatusCode)
	require.True(t, answer.Close)
	require.NoError(t, answer.Body.Close())
}

// TestRefusalInterruptsNothing: an upload that is refused removes the volume that it has made, and
// does not interrupt itself by that: the client goes on with its connection.
func TestRefusalInterruptsNothing(t *testing.T) {
	s := newServer(t)
	var dead atomic.Int32
	inner := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Context().Err() != nil {
			dead.Add(1)
		}
		s.Handler.ServeHTTP(w, r)
	}))
	defer inner.Close()
	s.URL = inner.URL
	for range 50 {
		requireSays(t, s.ask(t, http.MethodPut, "/volume/new/data", nil, fieldComplete, "?0",
			fieldLength, "999999999999999"), http.StatusInsufficientStorage)
		s.requireNone(t, "new")
	}
	require.Zero(t, dead.Load())
}

// TestRefusalWaitsForNobody: a client that has announced data which is not taken, and sends none,
// gets its answer, and keeps no connection.
func TestRefusalWaitsForNobody(t *testing.T) {
	s := newServer(t)
	s.handler.timeout = 100 * time.Millisecond
	at := s.create(t, "vm", 4096) // is in the way
	for _, request := range []string{"PUT /volume/vm/data HTTP/1.1\r\nContent-Length: 1000",
		"PUT /volume/vm/data HTTP/1.1\r\nTransfer-Encoding: chunked",
		"DELETE " + at + " HTTP/1.1\r\nContent-Length: 1000"} {
		c := testtool.Must(net.Dial("tcp", s.Listener.Addr().String()))(t)
		defer c.Close()
		require.NoError(t, testtool.Err(io.WriteString(c, request+"\r\nHost: x\r\n\r\n")))
		require.NoError(t, c.SetReadDeadline(time.Now().Add(testtool.Timeout)))
		answer := testtool.Must(http.ReadResponse(bufio.NewReader(c), nil))(t)
		require.NoError(t, answer.Body.Close())
	}
}

// TestUnpackingEndsWithTheVolume: some KiB are 4 GiB of zeros. Nobody waits for these when the
// volume is deleted or the server stops.
func TestUnpackingEndsWithTheVolume(t *testing.T) {
	testtool.Need(t, "bzip2")
	s := newServer(t)
	v := s.volumes.add(t, "vm", 8<<30)
	zeros := packtest.Tool(t, make([]byte, 64<<20), "bzip2")
	got := make(chan answer, 1)
	go func() { got <- s.put(t, "vm", bytes.Repeat(zeros, 64)) }()
	testtool.Eventually(t, func() bool { return slices.Contains(s.files(t, "vm"), dataName) },
		"the content is unpacked")
	v.end()
	require.Contains(t, (<-got).text, "interrupted")
	s.requireEmpty(t, "vm")
}
