package upload

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/packtest"

	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
)

// timeout is how long a test waits for something that happens soon.
const timeout = time.Minute

// create begins an upload that can be resumed, without data, and returns its address.
func (s *server) create(t *testing.T, name string, length int64, headers ...string) string {
	t.Helper()
	headers = append(headers, fieldComplete, "?0")
	if length >= 0 {
		headers = append(headers, fieldLength, strconv.FormatInt(length, 10))
	}
	a := s.ask(t, http.MethodPut, "/volume/"+name+"/data", nil, headers...)
	requireSays(t, a, http.StatusCreated)
	require.Equal(t, "?0", a.header.Get(fieldComplete))
	at := a.header.Get("Location")
	require.True(t, strings.HasPrefix(at, "/volume/"+name+"/data/"), at)
	require.Contains(t, a.header.Get(fieldLimit), "max-age=")
	return at
}

func (s *server) append(t *testing.T, at string, offset int, data []byte, last bool,
	headers ...string) answer {
	t.Helper()
	return s.ask(t, http.MethodPatch, at, bytes.NewReader(data), append(headers, "Content-Type",
		partialUpload, fieldOffset, strconv.Itoa(offset), fieldComplete, formatBool(last))...)
}

// offset asks how much of an upload has arrived.
func (s *server) offset(t *testing.T, at string) int {
	t.Helper()
	a := s.ask(t, http.MethodHead, at, nil)
	require.Equal(t, http.StatusNoContent, a.status)
	require.Equal(t, "?0", a.header.Get(fieldComplete))
	require.Equal(t, "no-store", a.header.Get("Cache-Control"))
	return testtool.Must(strconv.Atoi(a.header.Get(fieldOffset)))(t)
}

// cutOff sends the head of a request and a part of its content, waits until the part was received,
// and cuts the connection.
func (s *server) cutOff(t *testing.T, method, path string, part []byte, length int,
	headers ...string) {
	t.Helper()
	before := int(s.handler.Totals().Bytes)
	c := s.begin(t, method, path, part, length, headers...)
	s.waitFor(t, before+len(part))
	testtool.Eventually(t, func() bool { return len(s.handler.Receiving()) > 0 })
	require.NoError(t, c.Close())
	testtool.Eventually(t, func() bool { return len(s.handler.Receiving()) == 0 })
}

func (s *server) begin(t *testing.T, method, path string, part []byte, length int,
	headers ...string) net.Conn {
	t.Helper()
	c := testtool.Must(net.Dial("tcp", s.Listener.Addr().String()))(t)
	t.Cleanup(func() { _ = c.Close() })
	var head strings.Builder
	fmt.Fprintf(&head, "%s %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n", method, path, length)
	for i := 0; i < len(headers); i += 2 {
		fmt.Fprintf(&head, "%s: %s\r\n", headers[i], headers[i+1])
	}
	require.NoError(t, testtool.Err(c.Write(append([]byte(head.String()+"\r\n"), part...))))
	return c
}

// waitFor waits until this many bytes have been received since the start.
func (s *server) waitFor(t *testing.T, n int) {
	t.Helper()
	testtool.Eventually(t,
		func() bool { return s.handler.Totals().Bytes >= uint64(n) }, "%d bytes", n)
}

// TestPlainPutCutOff: without Upload-Complete, the server keeps nothing.
func TestPlainPutCutOff(t *testing.T) {
	for name, data := range map[string][]byte{"raw": rawDisk(8 << 20),
		"xz": packtest.Xz(rawDisk(8 << 20)), "the head": []byte("\xeb\x63")} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			s.cutOff(t, http.MethodPut, "/volume/new/data", data[:len(data)/2], len(data))
			s.requireNone(t, "new")
			s.volumes.add(t, "vm", 0)
			s.cutOff(t, http.MethodPut, "/volume/vm/data", data[:len(data)/2], len(data))
			s.requireEmpty(t, "vm")
			requireSays(t, s.put(t, "vm", rawDisk(8<<20)), http.StatusCreated)
		})
	}
}

// TestResume: an upload that was cut off goes on where it was, at any place, with any packing.
func TestResume(t *testing.T) {
	raw := rawDisk(6 << 20)
	all := packed(t, raw)
	all["qcow2"] = makeQcow2(t, raw)
	for name, data := range all {
		disk := raw
		if name == "qcow2" {
			disk = data // it is stored as it is
		}
		for _, cut := range []int{0, 1, 4096, 1<<20 + 17, len(data) - 1} {
			if cut >= len(data) {
				continue
			}
			t.Run(fmt.Sprintf("%s at %d", name, cut), func(t *testing.T) {
				t.Parallel()
				s := newServer(t)
				at := s.create(t, "vm", int64(len(data)), "Repr-Digest", digest256(data))
				s.cutOff(t, http.MethodPatch, at, data[:cut], len(data), "Content-Type",
					partialUpload, fieldOffset, "0", fieldComplete, "?1")
				require.Equal(t, cut, s.offset(t, at))
				require.Equal(t, cut, s.offset(t, at))
				half := cut + (len(data)-cut)/2
				requireSays(t, s.append(t, at, cut, data[cut:half], false), http.StatusNoContent)
				requireSays(t, s.append(t, at, half, data[half:], true), http.StatusCreated)
				require.True(t, bytes.Equal(disk, s.disk(t, "vm")))
				requireSays(t, s.append(t, at, len(data), nil, true), http.StatusNotFound)
				requireSays(t, s.ask(t, http.MethodHead, at, nil), http.StatusNotFound)
			})
		}
	}
}

// TestRestart: in a new process, an upload of plain data continues from its durable part. An upload
// of packed data is gone, and so is one that cannot be resumed.
func TestRestart(t *testing.T) {
	raw := rawDisk(6 << 20)
	image := makeQcow2(t, raw)
	for name, data := range map[string][]byte{"raw": raw, "qcow2": image} {
		for _, cut := range []int{0, 100, 2<<20 + 17, len(data)} {
			t.Run(fmt.Sprintf("%s at %d", name, cut), func(t *testing.T) {
				s := newServer(t)
				at := s.create(t, "vm", int64(len(data)))
				requireSays(t, s.append(t, at, 0, data[:cut], false), http.StatusNoContent)
				s = s.restart(t)
				require.Equal(t, cut, s.offset(t, at))
				a := s.append(t, at, cut, data[cut:], true, "Repr-Digest", digest256(data))
				requireSays(t, a, http.StatusCreated)
				require.True(t, bytes.Equal(data, s.disk(t, "vm")))
			})
		}
	}
	for name, data := range map[string][]byte{"gzip": packed(t, raw)["gzip"]} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			s.volumes.add(t, "vm", 0)
			at := s.create(t, "vm", int64(len(data)))
			requireSays(t, s.append(t, at, 0, data[:1<<20], false), http.StatusNoContent)
			s = s.restart(t)
			requireSays(t, s.ask(t, http.MethodPatch, at, nil, "Content-Type", partialUpload,
				fieldOffset, "0", fieldComplete, "?0"), http.StatusNotFound)
			s.requireEmpty(t, "vm")
			requireSays(t, s.put(t, "vm", data), http.StatusCreated)
		})
	}
}

// restart ends the server and starts another one with the volumes that storage has.
func (s *server) restart(t *testing.T) *server {
	t.Helper()
	s.end()
	var awaiting []string
	for name, v := range s.volumes.all {
		v.filling = false
		if !v.ready {
			awaiting = append(awaiting, name)
		}
	}
	next := serve(t, s.volumes)
	require.NoError(t, next.handler.Recover(t.Context(), awaiting))
	return next
}

// TestKilled: the next start removes the remains of a killed process, or continues with them.
func TestKilled(t *testing.T) {
	raw := rawDisk(3 << 20)
	s := newServer(t)
	at := s.create(t, "vm", int64(len(raw)))
	requireSays(t, s.append(t, at, 0, raw[:1<<20], false), http.StatusNoContent)
	dir := filepath.Join(s.volumes.dir, "vm")
	f := testtool.Must(os.OpenFile(filepath.Join(dir, dataName), os.O_WRONLY|os.O_APPEND, 0))(t)
	_, err := f.Write(bytes.Repeat([]byte{1}, 1<<20)) // written, but in no record yet
	require.NoError(t, err)
	require.NoError(t, f.Close())
	for _, name := range []string{"made", "awaits"} {
		v := &fakeVolume{of: s.volumes, name: name}
		require.NoError(t, os.Mkdir(v.Dir(), 0o700))
		rec := record{Version: recordVersion, ID: "x", Made: name == "made", Length: -1}
		require.NoError(t, rec.save(v.Disk()))
		require.NoError(t, os.WriteFile(filepath.Join(v.Dir(), dataName), raw, 0o600))
		s.volumes.all[name] = v
	}
	begun := s.create(t, "begun", int64(len(raw)))
	disk := (&fakeVolume{of: s.volumes, name: "begun"}).Disk()
	first := testtool.Must(loadRecord(disk))(t)
	first.Sums = nil // killed before the first answer
	require.NoError(t, first.save(disk))
	s = s.restart(t)
	requireSays(t, s.append(t, begun, 0, raw, true, "Repr-Digest", digest256(raw)),
		http.StatusCreated)
	s.requireNone(t, "made")
	s.requireEmpty(t, "awaits")
	require.Equal(t, 1<<20, s.offset(t, at))
	requireSays(t, s.append(t, at, 1<<20, raw[1<<20:], true), http.StatusCreated)
	require.True(t, bytes.Equal(raw, s.disk(t, "vm")))
}

// TestKilledBeforeServing: all data has come and has its final name, but the volume is not served
// yet. The client asks, and ends its upload once more. What the volume has begun to make of the
// data is gone by then: a disk would be missed otherwise, or be taken for that of other data.
func TestKilledBeforeServing(t *testing.T) {
	raw := rawDisk(1 << 20)
	for name, data := range map[string][]byte{diskName: raw, qcow2Name: makeQcow2(t, raw)} {
		s := newServer(t)
		at := s.create(t, "vm", int64(len(data)))
		requireSays(t, s.append(t, at, 0, data, false), http.StatusNoContent)
		dir := filepath.Join(s.volumes.dir, "vm")
		disk := filepath.Join(dir, diskName)
		rec := testtool.Must(loadRecord(disk))(t)
		rec.Placed = true
		require.NoError(t, rec.save(disk))
		require.NoError(t, os.Rename(filepath.Join(dir, dataName), filepath.Join(dir, name)))
		begun := []string{diskName + ".state", diskName + ".map"}
		if name == qcow2Name {
			begun = append(begun, diskName)
		}
		for _, one := range begun {
			require.NoError(t, os.WriteFile(filepath.Join(dir, one), []byte("begun"), 0o600))
		}
		s = s.restart(t)
		require.Equal(t, len(data), s.offset(t, at))
		for _, one := range begun {
			require.NoFileExists(t, filepath.Join(dir, one))
		}
		requireSays(t, s.append(t, at, len(data), nil, true), http.StatusCreated)
		require.True(t, bytes.Equal(data, s.disk(t, "vm")))
	}
}

// TestServerStopsAtTheEnd: the server stops while it makes the volume's disk of all the data, and
// the next one has the data.
func TestServerStopsAtTheEnd(t *testing.T) {
	raw := rawDisk(1 << 20)
	s := newServer(t)
	at := s.create(t, "vm", int64(len(raw)))
	v := s.volumes.all["vm"]
	v.fails = api.Errorf(api.CodeUnavailable, "the daemon is stopping")
	requireSays(t, s.append(t, at, 0, raw, true), http.StatusServiceUnavailable, "is stopping")
	v.fails = nil
	s = s.restart(t)
	require.Equal(t, len(raw), s.offset(t, at))
	requireSays(t, s.append(t, at, len(raw), nil, true), http.StatusCreated)
	require.True(t, bytes.Equal(raw, s.disk(t, "vm")))
}

// TestRoomBetweenRequests: an upload that waits has no room reserved, and asks for it again.
func TestRoomBetweenRequests(t *testing.T) {
	raw := rawDisk(4 << 20)
	all := packed(t, raw)
	all["raw"] = raw
	for _, data := range all {
		s := newServer(t)
		at := s.create(t, "vm", int64(len(data)))
		half := len(data) / 2
		requireSays(t, s.append(t, at, 0, data[:half], false), http.StatusNoContent)
		s.volumes.limit = 1 << 20 // others have taken the rest
		requireSays(t, s.append(t, at, half, data[half:], false), http.StatusInsufficientStorage,
			"too large")
	}
}

// TestRoomForTheRest: an upload that says late how long it is needs room for what is to come, and
// not once more for what has come.
func TestRoomForTheRest(t *testing.T) {
	s := newServer(t)
	v := s.volumes.add(t, "vm", 0)
	at := s.create(t, "vm", -1)
	requireSays(t, s.append(t, at, 0, rawDisk(1<<20), false), http.StatusNoContent)
	rec := testtool.Must(loadRecord(v.Disk()))(t)
	free := testtool.Must(osfile.AvailableSpace(v.Dir()))(t)
	rec.Offset, rec.Sums = free&^511, nil // most of it is a hole
	require.NoError(t, os.Truncate(v.Disk()+dataSuffix, rec.Offset))
	require.NoError(t, rec.save(v.Disk()))
	requireSays(t, s.append(t, at, int(rec.Offset), make([]byte, 1<<20), false,
		fieldLength, strconv.FormatInt(rec.Offset+1<<20, 10)), http.StatusNoContent)
}

// TestInformed: a client that asks for a resumable upload learns its address before it sends
// anything (draft, section 4.2.2).
func TestInformed(t *testing.T) {
	s := newServer(t)
	raw := rawDisk(1 << 20)
	at := make(chan string, 1)
	trace := &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
		if code == statusResumable {
			at <- h.Get("Location")
			require.Contains(t, h.Get(fieldLimit), "max-age=")
		}
		return nil
	}}
	reader, writer := io.Pipe()
	r := testtool.Must(http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace),
		http.MethodPut, s.URL+"/volume/vm/data", reader))(t)
	r.ContentLength = int64(len(raw))
	r.Header.Set(fieldComplete, "?1")
	go func() {
		<-at
		_, _ = writer.Write(raw)
		_ = writer.Close()
	}()
	back := testtool.Must(http.DefaultTransport.RoundTrip(r))(t)
	_ = back.Body.Close()
	require.Equal(t, http.StatusCreated, back.StatusCode)
	require.Equal(t, "?1", back.Header.Get(fieldComplete))
	require.True(t, bytes.Equal(raw, s.disk(t, "vm")))
}

// TestOneAtATime: a second upload is refused while one is running, or waits to be resumed. A client
// that has not asked for it gets no interim response, because it might not understand that.
func TestOneAtATime(t *testing.T) {
	s := newServer(t)
	raw := rawDisk(4 << 20)
	c := s.begin(t, http.MethodPut, "/volume/vm/data", raw[:2<<20], len(raw))
	s.waitFor(t, 2<<20)
	requireSays(t, s.put(t, "vm", raw), http.StatusConflict, "under way")
	all := s.handler.Receiving()
	require.Len(t, all, 1)
	require.Equal(t, "vm", all[0].Volume)
	require.EqualValues(t, len(raw), all[0].TotalBytes)
	require.NoError(t, testtool.Err(c.Write(raw[2<<20:])))
	line := testtool.Must(bufio.NewReader(c).ReadString('\n'))(t)
	require.Equal(t, "HTTP/1.1 201 Created\r\n", line)
	require.True(t, bytes.Equal(raw, s.disk(t, "vm")))

	at := s.create(t, "other", int64(len(raw)))
	a := s.put(t, "other", raw)
	requireSays(t, a, http.StatusConflict, "interrupted", at)
	require.Equal(t, at, a.header.Get("Location"))
	requireSays(t, s.ask(t, http.MethodDelete, at, nil), http.StatusNoContent)
	s.requireNone(t, "other")
	requireSays(t, s.ask(t, http.MethodDelete, at, nil), http.StatusNotFound)
	requireSays(t, s.put(t, "other", raw), http.StatusCreated)

	c = s.begin(t, http.MethodPut, "/volume/third/data", raw[:2<<20], len(raw))
	s.waitFor(t, 2<<20)
	s.handler.Close() // it is no fault of the client
	line = testtool.Must(bufio.NewReader(c).ReadString('\n'))(t)
	require.Equal(t, "HTTP/1.1 503 Service Unavailable\r\n", line)
}

// TestTakeOver: a client that resumes has given up its earlier connection, which the server may not
// have noticed (draft, section 4.6).
func TestTakeOver(t *testing.T) {
	for name, data := range packed(t, rawDisk(4<<20)) {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			at := s.create(t, "vm", int64(len(data)))
			s.begin(t, http.MethodPatch, at, data[:2<<20], len(data), "Content-Type", partialUpload,
				fieldOffset, "0", fieldComplete, "?1")
			s.waitFor(t, 2<<20)
			offset := s.offset(t, at)
			require.Equal(t, 2<<20, offset)
			requireSays(t, s.append(t, at, offset, data[offset:], true), http.StatusCreated)
			s.disk(t, "vm")
		})
	}
}

// TestCancelWhileReceiving: DELETE ends a request that is under way.
func TestCancelWhileReceiving(t *testing.T) {
	s := newServer(t)
	s.volumes.add(t, "vm", 0)
	data := rawDisk(4 << 20)
	at := s.create(t, "vm", int64(len(data)))
	s.begin(t, http.MethodPatch, at, data[:2<<20], len(data), "Content-Type", partialUpload,
		fieldOffset, "0", fieldComplete, "?1")
	s.waitFor(t, 2<<20)
	requireSays(t, s.ask(t, http.MethodDelete, at, nil), http.StatusNoContent)
	s.requireEmpty(t, "vm")
}

// TestMustEnd: an upload ends when its volume asks for that.
func TestMustEnd(t *testing.T) {
	s := newServer(t)
	v := s.volumes.add(t, "vm", 0)
	s.begin(t, http.MethodPut, "/volume/vm/data", rawDisk(1<<20), 4<<20)
	s.waitFor(t, 1<<20)
	v.end()
	testtool.Eventually(t, func() bool { return len(s.handler.Receiving()) == 0 })
	s.requireEmpty(t, "vm")
}

// TestAppendRefused: a request that contradicts the upload changes nothing.
func TestAppendRefused(t *testing.T) {
	s := newServer(t)
	data := rawDisk(1 << 20)
	at := s.create(t, "vm", int64(len(data)))
	requireSays(t, s.append(t, at, 0, data[:5000], false), http.StatusNoContent)
	a := s.append(t, at, 100, data[100:], true)
	requireSays(t, a, http.StatusConflict, "5000")
	require.Equal(t, "5000", a.header.Get(fieldOffset))
	for name, test := range map[string]struct {
		body    []byte
		headers []string
		status  int
	}{
		"too much":        {append(data[5000:], 0), []string{fieldComplete, "?1"}, 400},
		"too little":      {data[5001:], []string{fieldComplete, "?1"}, 400},
		"another length":  {nil, []string{fieldComplete, "?0", fieldLength, "7000"}, 400},
		"no completeness": {data[5000:], nil, 400},
		"a wrong one":     {data[5000:], []string{fieldComplete, "yes"}, 400},
		"no offset":       {data[5000:], []string{fieldComplete, "?1", fieldOffset, ""}, 400},
		"a wrong offset":  {data[5000:], []string{fieldComplete, "?1", fieldOffset, "-1"}, 400},
		"another type": {data[5000:],
			[]string{fieldComplete, "?1", "Content-Type", "a/b"}, 415},
		"a strange digest": {nil, []string{fieldComplete, "?0", "Content-Digest", "x"}, 400},
	} {
		t.Run(name, func(t *testing.T) {
			headers := append([]string{"Content-Type", partialUpload, fieldOffset, "5000"},
				test.headers...)
			a := s.ask(t, http.MethodPatch, at, bytes.NewReader(test.body), headers...)
			requireSays(t, a, test.status)
			require.Equal(t, 5000, s.offset(t, at))
		})
	}
	requireSays(t, s.append(t, at, 5000, data[5000:], true), http.StatusCreated)
	require.True(t, bytes.Equal(data, s.disk(t, "vm")))
}

// TestAppendWithWrongDigest: the data may be anywhere by then, so the upload is given up.
func TestAppendWithWrongDigest(t *testing.T) {
	s := newServer(t)
	data := rawDisk(1 << 20)
	for _, test := range []struct {
		field string
		last  bool
	}{{"Content-Digest", false}, {"Content-Digest", true}, {"Repr-Digest", true}} {
		at := s.create(t, "vm", int64(len(data)))
		a := s.append(t, at, 0, data, test.last, test.field, digest256(data[1:]))
		requireSays(t, a, http.StatusBadRequest, test.field)
		requireSays(t, s.append(t, at, 0, data, true), http.StatusNotFound)
		s.requireNone(t, "vm")
	}
	at := s.create(t, "vm", int64(len(data)))
	requireSays(t, s.append(t, at, 0, data[:5000], false, "Content-Digest",
		digest256(data[:5000])), http.StatusNoContent)
	requireSays(t, s.append(t, at, 5000, data[5000:], true, "Content-Digest",
		digest256(data[5000:]), "Repr-Digest", digest256(data)), http.StatusCreated)
	require.True(t, bytes.Equal(data, s.disk(t, "vm")))
}

// TestManyWait: packed uploads that wait for their next request take memory, so only some of them
// are kept.
func TestManyWait(t *testing.T) {
	s := newServer(t)
	data := packtest.Xz(rawDisk(1 << 20))
	at := make([]string, maxPaused+2)
	for i := range at {
		at[i] = s.create(t, fmt.Sprint("vm", i), int64(len(data)))
		requireSays(t, s.append(t, at[i], 0, data[:5000], false), http.StatusNoContent)
	}
	for i, address := range at {
		a := s.append(t, address, 5000, data[5000:], true)
		if i < 2 {
			requireSays(t, a, http.StatusNotFound)
		} else {
			requireSays(t, a, http.StatusCreated)
		}
	}
}
