package main

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/readyfile"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/pages"
)

func TestHealthcheck(t *testing.T) {
	var code atomic.Int32
	var asked atomic.Value
	l := testtool.Must(net.Listen("tcp4", "127.0.0.1:0"))(t)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Store(r.URL.Path)
		w.WriteHeader(int(code.Load()))
		fmt.Fprintln(w, "the reason")
	})}
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())

	for _, c := range []struct {
		env, args []string
		path      string
	}{
		{env: []string{"METRICS_LISTEN=:" + port}, path: "/readyz"},
		{env: []string{"METRICS_LISTEN=0.0.0.0:" + port}, args: []string{"--live"},
			path: "/healthz"},
		{env: []string{"METRICS_LISTEN=127.0.0.1:" + port, "http_proxy=http://192.0.2.1:1"},
			path: "/readyz"},
		{args: []string{"--metrics-listen=localhost:" + port}, path: "/readyz"},
		{args: []string{"--config=" +
			yamlFile(t, "metrics-listen: 127.0.0.1:"+port+"\ndisk-dir: /x\n")}, path: "/readyz"},
		{env: []string{"METRICS_LISTEN=:" + port, "COPY_MODE=nonsense", "CHAP_USERNAME=half"},
			path: "/readyz"},
	} {
		for want, answer := range map[int]int{exitDone: http.StatusOK,
			exitFailed: http.StatusServiceUnavailable} {
			code.Store(int32(answer))
			asked.Store("")
			args := append([]string{"healthcheck", "--timeout=" + timeout.String()}, c.args...)
			status, stdout, stderr := run(t, c.env, args...)
			require.Equal(t, want, status, stderr)
			require.Equal(t, c.path, asked.Load())
			require.Contains(t, stdout+stderr, "the reason")
		}
	}
}

// TestHealthcheckOfAnotherContainer: the daemon of another container of the pod may answer at the
// default address of the pages. Its answer does not count, unless a person has named the address.
func TestHealthcheckOfAnotherContainer(t *testing.T) {
	place := "mnt:[1]"
	ts := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set(pages.ContainerHeader, place)
		fmt.Fprintln(w, "ok of whom")
	}))
	defer ts.Close()
	page, _ := testtool.Must2(parsePortal(ts.Listener.Addr().String(), defaultPort))(t)
	ready := filepath.Join(t.TempDir(), "healthy")
	check := func(chosen bool, readyFile string, live bool) (string, error) {
		return checkHealth(t.Context(), &page, chosen, readyFile, live)
	}
	require.ErrorContains(t, testtool.Err(check(false, ready, false)), "not ready")
	made := readyfile.File{Path: ready}
	require.NoError(t, made.Write())
	defer func() { require.NoError(t, made.Remove()) }()
	answer, err := check(false, ready, false)
	require.NoError(t, err)
	require.Equal(t, "ok", answer)
	for _, c := range []struct {
		readyFile string
		live      bool
	}{{"", false}, {ready, true}} {
		_, err = check(false, c.readyFile, c.live)
		require.ErrorContains(t, err, "not a page of the daemon in this container")
		require.ErrorContains(t, err, "METRICS_LISTEN")
	}
	for _, own := range []string{pages.Container(), ""} {
		place = own
		answer = testtool.Must(check(false, "", true))(t)
		require.Equal(t, "ok of whom", answer)
	}
	place = "mnt:[1]"
	answer = testtool.Must(check(true, "", true))(t)
	require.Equal(t, "ok of whom", answer)
}

// TestTimeoutsOfQuestions asks a daemon that never answers.
func TestTimeoutsOfQuestions(t *testing.T) {
	never := make(chan struct{})
	ts := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-never }))
	defer ts.Close()
	defer close(never)
	for _, args := range [][]string{
		{"healthcheck", "--timeout=100ms", "--metrics-listen=" + ts.Listener.Addr().String()},
		{"xml", "--timeout=100ms", "--status-url=" + ts.URL},
	} {
		fails(t, nil, exitFailed, "deadline exceeded", args...)
	}
}

func TestHealthcheckWithoutADaemonOrPages(t *testing.T) {
	port := testtool.Must(peers.FreePort())(t)
	gone := fmt.Sprintf("127.0.0.1:%d", port)
	stderr := fails(t, []string{"METRICS_LISTEN=" + gone}, exitFailed, gone, "healthcheck")
	require.Contains(t, stderr, "is the daemon running")

	ready := filepath.Join(t.TempDir(), "healthy")
	off := []string{"METRICS_LISTEN=", "READY_FILE=" + ready}
	fails(t, off, exitFailed, ready, "healthcheck")
	require.NoError(t, os.WriteFile(ready, []byte("ready\n"), 0o644)) // of a daemon that was killed
	fails(t, off, exitFailed, "has ended", "healthcheck")
	made := readyfile.File{Path: ready}
	require.NoError(t, made.Clear())
	require.NoError(t, made.Write())
	defer func() { require.NoError(t, made.Remove()) }()
	stdout, _ := works(t, off, "healthcheck")
	require.Equal(t, "ok\n", stdout)
	works(t, []string{"METRICS_LISTEN=127.0.0.1:0", "READY_FILE=" + ready}, "healthcheck")
	fails(t, off, exitFailed, "", "healthcheck", "--live")
	fails(t, []string{"METRICS_LISTEN=", "READY_FILE=" + filepath.Dir(ready)}, exitFailed,
		"is not a regular file", "healthcheck")
	fails(t, []string{"METRICS_LISTEN=", "READY_FILE="}, exitFailed, "", "healthcheck")
	fails(t, nil, exitUsage, "", "healthcheck", "--metrics-listen=nowhere")
}

func TestHealthcheckOfADaemon(t *testing.T) {
	l := newPlace(t, "a.raw")
	p := l.serve(t)
	address := p.logged("metrics", "address").(string)
	_, place := testtool.Must2(askPage(t.Context(), "http://"+address+"/readyz"))(t)
	require.Equal(t, pages.Container(), place, "a daemon tells where it is")
	require.NotEmpty(t, place)
	for _, args := range [][]string{{"healthcheck"}, {"healthcheck", "--live"}} {
		args = append(args, "--timeout="+timeout.String())
		stdout, _ := works(t, []string{"METRICS_LISTEN=" + address}, args...)
		require.Equal(t, "ok", strings.TrimSpace(stdout))
	}
	require.Equal(t, exitDone, p.terminate())
	status, _, _ := run(t, []string{"METRICS_LISTEN=" + address}, "healthcheck")
	require.Equal(t, exitFailed, status)
}
