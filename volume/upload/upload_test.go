package upload

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
)

// The names of a fake volume's files. What its own file is called, only the volume knows.
const (
	diskName   = "root.disk"
	ownName    = diskName + ".own"
	recordName = diskName + recordSuffix
	dataName   = diskName + dataSuffix
	qcow2Name  = diskName + qcow2Suffix
)

// fakeVolumes are volumes in directories, without disks.
type fakeVolumes struct {
	dir   string
	limit int64 // of all volumes together; 0: none

	mu  sync.Mutex
	all map[string]*fakeVolume // guarded by mu
}

type fakeVolume struct {
	of      *fakeVolumes
	name    string
	size    int64
	ready   bool
	image   string
	filling bool
	fails   error  // of Complete
	done    func() // is called by Complete at its end; nil: nothing
	room    func() // is called by Reserve; nil: nothing
	ctx     context.Context
	cancel  context.CancelFunc
}

func (f *fakeVolumes) add(t *testing.T, name string, size int64) *fakeVolume {
	t.Helper()
	v := &fakeVolume{of: f, name: name, size: size}
	require.NoError(t, os.MkdirAll(v.Dir(), 0o700))
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all[name] = v
	return v
}

func (f *fakeVolumes) Fill(_ context.Context, name string, make bool) (Volume, bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.all[name]
	made := v == nil && make
	switch {
	case made:
		v = &fakeVolume{of: f, name: name}
		if err := os.MkdirAll(v.Dir(), 0o700); err != nil {
			return nil, false, err
		}
		f.all[name] = v
	case v == nil:
		return nil, false, api.Errorf(api.CodeNotFound, "there is no volume %q", name)
	case v.ready:
		return nil, false, api.Errorf(api.CodeHasData, "the volume %q has its data", name)
	case v.filling:
		return nil, false, api.Errorf(api.CodeBusy, "the volume %q is being filled", name)
	}
	v.filling = true
	v.ctx, v.cancel = context.WithCancel(context.Background())
	return v, made, nil
}

func (v *fakeVolume) Undo(context.Context) error {
	v.of.mu.Lock()
	defer v.of.mu.Unlock()
	if v.of.all[v.name] != v {
		return errors.New("it is another volume")
	}
	delete(v.of.all, v.name)
	v.cancel()
	return os.RemoveAll(v.Dir())
}

// end ends what is done with the volume, as a DELETE with force does.
func (v *fakeVolume) end() {
	v.of.mu.Lock()
	defer v.of.mu.Unlock()
	v.cancel()
}

func (v *fakeVolume) Dir() string              { return filepath.Join(v.of.dir, v.name) }
func (v *fakeVolume) Disk() string             { return filepath.Join(v.Dir(), diskName) }
func (v *fakeVolume) Context() context.Context { return v.ctx }
func (v *fakeVolume) Size() int64              { return v.size }
func (v *fakeVolume) Progress(_, _ int64)      {}

func (v *fakeVolume) Files() (paths []string, err error) {
	names, err := osfile.Names(v.Dir())
	for _, name := range names {
		if strings.HasPrefix(name, diskName) && name != ownName {
			paths = append(paths, filepath.Join(v.Dir(), name))
		}
	}
	return paths, err
}

func (v *fakeVolume) Reserve(size int64) error {
	if v.room != nil {
		v.room()
	}
	if v.of.limit > 0 && size > v.of.limit {
		return api.Errorf(api.CodeLimit, "a volume of %d bytes is too large", size)
	}
	return nil
}

func (v *fakeVolume) Complete(_ context.Context, image string) error {
	if v.fails != nil {
		return v.fails
	}
	v.of.mu.Lock()
	defer v.of.mu.Unlock()
	v.ready, v.image = true, image
	if v.done != nil {
		v.done()
	}
	return nil
}

func (v *fakeVolume) Release() {
	v.of.mu.Lock()
	defer v.of.mu.Unlock()
	v.filling = false
}

// server is a Handler behind an HTTP server.
type server struct {
	http.Server
	Listener net.Listener
	URL      string
	handler  *Handler
	volumes  *fakeVolumes
}

func newServer(t *testing.T) *server {
	t.Helper()
	return serve(t, &fakeVolumes{dir: t.TempDir(), all: map[string]*fakeVolume{}})
}

// serve starts a server for volumes, which may be from an earlier one.
func serve(t *testing.T, volumes *fakeVolumes) *server {
	t.Helper()
	s := &server{volumes: volumes}
	s.handler = New(Options{
		Fill: volumes.Fill,
		Done: func(w http.ResponseWriter, _ *http.Request, name string) {
			w.WriteHeader(http.StatusCreated)
			fmt.Fprintln(w, name, "is ready")
		},
		Refuse: func(w http.ResponseWriter, _ *http.Request, err error) {
			status := http.StatusInternalServerError
			if refused, ok := errors.AsType[*api.Error](err); ok {
				status = refused.HTTPStatus()
			}
			text := fmt.Sprintln(err)
			w.Header().Set("Content-Length", strconv.Itoa(len(text)))
			w.WriteHeader(status)
			fmt.Fprint(w, text)
		},
	})
	mux := http.NewServeMux()
	mux.Handle("/volume/{name}/data", s.handler)
	mux.Handle("/volume/{name}/data/{upload}", s.handler)
	s.Listener = testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	s.URL, s.Server.Handler = "http://"+s.Listener.Addr().String(), mux
	go func() { _ = s.Serve(s.Listener) }()
	t.Cleanup(s.end)
	return s
}

// end does not wait for connections, as an httptest server would: a connection that is closed
// before all of a request was read stays for half a second.
func (s *server) end() {
	s.handler.Close()
	_ = s.Close()
}

// answer is the answer to a request.
type answer struct {
	status int
	header http.Header
	text   string
}

// ask sends a request. headers are pairs.
func (s *server) ask(t *testing.T, method, path string, body io.Reader, headers ...string) answer {
	t.Helper()
	return testtool.Must(s.try(t, method, path, body, headers...))(t)
}

func (s *server) try(t *testing.T, method, path string, body io.Reader, headers ...string) (
	answer, error) {
	t.Helper()
	r := testtool.Must(http.NewRequestWithContext(t.Context(), method, s.URL+path, body))(t)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	back, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		return answer{}, err
	}
	defer back.Body.Close()
	text := testtool.Must(io.ReadAll(back.Body))(t)
	return answer{back.StatusCode, back.Header, string(text)}, nil
}

// put uploads data at once, as curl does.
func (s *server) put(t *testing.T, name string, data []byte, headers ...string) answer {
	t.Helper()
	return s.ask(t, http.MethodPut, "/volume/"+name+"/data", bytes.NewReader(data), headers...)
}

// disk returns the content of a volume that is ready.
func (s *server) disk(t *testing.T, name string) []byte {
	t.Helper()
	s.volumes.mu.Lock()
	v := s.volumes.all[name]
	s.volumes.mu.Unlock()
	require.NotNil(t, v)
	require.True(t, v.ready, "the volume is not ready")
	file := diskName
	if v.image != "" {
		file = filepath.Base(v.image)
	}
	content := testtool.Must(os.ReadFile(filepath.Join(v.Dir(), file)))(t)
	require.Equal(t, []string{file}, s.files(t, name))
	return content
}

// files returns the names of the files in a volume's directory.
func (s *server) files(t *testing.T, name string) (names []string) {
	t.Helper()
	entries := testtool.Must(os.ReadDir(filepath.Join(s.volumes.dir, name)))(t)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// requireEmpty checks that a volume awaits content and that no upload has left anything.
func (s *server) requireEmpty(t *testing.T, name string) {
	t.Helper()
	s.volumes.mu.Lock()
	v := s.volumes.all[name]
	s.volumes.mu.Unlock()
	require.NotNil(t, v, "the volume is gone")
	require.False(t, v.ready)
	require.Empty(t, s.files(t, name))
}

// requireNone checks that there is no volume of that name.
func (s *server) requireNone(t *testing.T, name string) {
	t.Helper()
	s.volumes.mu.Lock()
	defer s.volumes.mu.Unlock()
	require.Nil(t, s.volumes.all[name])
	require.NoDirExists(t, filepath.Join(s.volumes.dir, name))
}

// rawDisk makes a disk with a boot sector, data and zeros.
func rawDisk(size int) []byte {
	p := make([]byte, size)
	random := rand.NewChaCha8([32]byte{1})
	for off := 0; off < size; off += 3 << 20 {
		_, _ = random.Read(p[off:min(off+1<<20, size)])
	}
	copy(p, "\xeb\x63\x90")
	copy(p[510:], "\x55\xaa")
	return p
}

// requireSays checks an answer and its text.
func requireSays(t *testing.T, a answer, status int, parts ...string) {
	t.Helper()
	require.Equal(t, status, a.status, a.text)
	for _, part := range parts {
		require.True(t, strings.Contains(a.text, part), "%q does not say %q", a.text, part)
	}
}

// FuzzFields: a header field is read or refused, whatever it says.
func FuzzFields(f *testing.F) {
	f.Add("?1")
	f.Add("12;a=b")
	f.Add(digest256(nil))
	f.Add(digest512(nil) + ", md5=:AA==:, sha-256=:;x")
	f.Fuzz(func(t *testing.T, value string) {
		h := http.Header{"F": []string{value}}
		_, _ = boolField(h, "F")
		require.GreaterOrEqual(t, intField(h, "F"), int64(-1))
		found, err := digestField(h, "F")
		require.Equal(t, err == nil, len(found) > 0)
		for name, sum := range found {
			require.Len(t, sum, algorithms[name])
		}
	})
}

// FuzzRecord: a record that contradicts itself is refused, or can be written again.
func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"version":1,"id":"x","length":-1}`))
	f.Add([]byte(`{"version":1,"id":"x","length":9,"offset":9,"format":"raw",` +
		`"sums":{"sha-256":"AA=="}}`))
	f.Fuzz(func(t *testing.T, state []byte) {
		text, err := durable.EncodeRecord(json.RawMessage(state))
		if err != nil {
			return // it is no JSON
		}
		dir := t.TempDir()
		disk := filepath.Join(dir, diskName)
		require.NoError(t, os.WriteFile(disk+recordSuffix, text, 0o600))
		r, err := loadRecord(disk)
		if err != nil {
			return
		}
		_, _ = loadSummer(r.Sums)
		require.NoError(t, r.save(disk))
	})
}
