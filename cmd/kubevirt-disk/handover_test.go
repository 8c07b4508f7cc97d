package main

import (
	"context"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"
)

func TestHandoverCommandLine(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "control.sock") // of no daemon
	for name, c := range map[string]struct {
		args   []string
		status int
		want   string
	}{
		"nobody is there":        {[]string{"--lun=1", "--finish"}, exitFailed, "no daemon answers at " + strconv.Quote(socket)},
		"no directory":           {[]string{"--lun=1", "--finish", "--control-socket=" + socket + "/none/c"}, exitFailed, "no daemon answers"},
		"where it may be":        {[]string{"--lun=1", "--finish"}, exitFailed, "no such file or directory: is it running, with the same --work-dir (WORK_DIR) or --control-socket"},
		"no LUN":                 {[]string{"--finish"}, exitUsage, "--lun: is missing"},
		"LUN 0":                  {[]string{"--lun=0", "--finish"}, exitUsage, "--lun: is missing"},
		"a LUN too high":         {[]string{"--lun=65536", "--finish"}, exitUsage, "--lun"},
		"no action":              {[]string{"--lun=1"}, exitUsage, "give one of --to, --finish and --cancel"},
		"an empty name":          {[]string{"--lun=1", "--to="}, exitUsage, "give one of --to, --finish and --cancel"},
		"two actions":            {[]string{"--lun=1", "--finish", "--cancel"}, exitUsage, "give one of --to, --finish and --cancel"},
		"a name and another one": {[]string{"--lun=1", "--to=" + second, "--cancel"}, exitUsage, "give one of --to, --finish and --cancel"},
		"a time that is over":    {[]string{"--lun=1", "--to=" + second, "--for=-5m"}, exitUsage, "--for: goes with --to"},
		"a time to finish":       {[]string{"--lun=1", "--finish", "--for=5m"}, exitUsage, "--for: goes with --to"},
		"a negative one":         {[]string{"--lun=1", "--finish", "--for=-5m"}, exitUsage, "--for: goes with --to"},
		"no socket":              {[]string{"--lun=1", "--finish", "--control-socket="}, exitUsage, "--control-socket: is empty"},
		"an argument":            {[]string{"--lun=1", "finish"}, exitUsage, "usage is"},
	} {
		status, stdout, stderr := run(t, []string{"CONTROL_SOCKET=" + socket}, append([]string{"handover"}, c.args...)...)
		require.Equal(t, c.status, status, "%s: %s", name, stderr)
		require.Contains(t, stderr, c.want, name)
		require.Empty(t, stdout, name)
	}
}

// TestHandoverTellsWhatTheDaemonSays: what is refused is a failure, with the daemon's reason.
func TestHandoverTellsWhatTheDaemonSays(t *testing.T) {
	l := newPlace(t, "a.raw")
	p := l.serve(t)
	for _, c := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"--lun=1", "--finish"}, exitFailed, "LUN 1 is open to nobody but its owner; open it first"},
		{[]string{"--lun=7", "--to=" + second}, exitFailed, "there is no LUN 7"},
		{[]string{"--lun=1", "--to=somebody"}, exitFailed, "is not an iSCSI name"},
		{[]string{"--lun=1", "--to=" + second, "--for=5m"}, exitDone, "LUN 1 is open to " + second + " too, for 5m0s"},
		{[]string{"--lun=1", "--finish"}, exitFailed, second + " is not logged in"},
		{[]string{"--lun=1", "--cancel"}, exitDone, second + " is fenced"},
	} {
		status, stdout, stderr := run(t, l.env, append([]string{"handover"}, c.args...)...)
		require.Equal(t, c.status, status, c.args)
		if status == exitDone {
			require.Contains(t, stdout, c.want, c.args)
			require.Empty(t, stderr, c.args)
			continue
		}
		require.Contains(t, stderr, c.want, c.args)
		require.Empty(t, stdout, c.args)
	}
	require.Equal(t, exitDone, p.terminate())
}

func TestHandoverOfADaemonThatMayNotBeAsked(t *testing.T) {
	for _, cause := range []error{unix.EACCES, unix.EPERM} {
		err := handoverPending(1).explain(&url.Error{Op: "Post", URL: "http://daemon/handover",
			Err: &fs.PathError{Op: "open", Path: "/work", Err: cause}}, "/work/control.sock")
		require.EqualError(t, err, fmt.Sprintf("user %d may not ask at \"/work/control.sock\": a daemon obeys its own user and root: open /work: %v", os.Geteuid(), cause))
	}
	err := handoverPending(1).explain(&url.Error{Op: "Post", URL: "http://daemon/handover",
		Err: &strangerError{"/work/control.sock"}}, "/work/control.sock")
	require.EqualError(t, err, (&strangerError{"/work/control.sock"}).Error())
}

// TestHandoverExplainsTheNameOfAQEMU, which nobody has chosen and whose UUID is in no list of machines.
func TestHandoverExplainsTheNameOfAQEMU(t *testing.T) {
	const qemu = "iqn.2008-11.org.linux-kvm:3c7a1ef4-1a0b-4d4e-8a6f-0d5b4f6a2b11"
	l := newPlace(t, "a.raw")
	p := l.serve(t)
	status, stdout, _ := run(t, l.env, "handover", "--lun=1", "--to="+qemu)
	require.Equal(t, exitDone, status)
	require.Contains(t, stdout, "LUN 1 is open to "+qemu+" too")
	require.Contains(t, stdout, "is the default of a QEMU")
	status, _, stderr := run(t, l.env, "handover", "--lun=1", "--finish")
	require.Equal(t, exitFailed, status)
	require.Contains(t, stderr, qemu+" is not logged in")
	require.Contains(t, stderr, "xml --initiator-name")
	status, stdout, _ = run(t, l.env, "handover", "--lun=1", "--cancel")
	require.Equal(t, exitDone, status)
	require.Contains(t, stdout, "is the default of a QEMU")
	require.Equal(t, "LUN 1 is open to "+second, explainInitiators("LUN 1 is open to "+second))
	require.Equal(t, exitDone, p.terminate())
}

// TestHandoverAsksSomethingElse: a server that is no daemon of this program.
func TestHandoverAsksSomethingElse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	l, err := listenUnix(path)
	require.NoError(t, err)
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	require.NoError(t, server.Listener.Close())
	server.Listener = l
	server.Start()
	defer server.Close()
	var client controlClient
	err = client.ask(t.Context(), path, http.MethodPost, pathHandover, handoverRequest{}, nil)
	require.ErrorContains(t, err, "does not know what was asked")
}

// TestServeWithoutAControlSocket: disks are served where there can be none, and the log says why and what to do.
func TestServeWithoutAControlSocket(t *testing.T) {
	l := newPlace(t, "a.raw")
	path := filepath.Join(l.dir, "socket")
	require.NoError(t, os.WriteFile(path, []byte("precious"), 0o600))
	p := l.serve(t, "CONTROL_SOCKET="+path)
	const said = "there is no control socket, so handover, sessions and kick find no daemon"
	require.Contains(t, p.logged(said, "error"), strconv.Quote(path)+" is there already, and no socket")
	require.Contains(t, p.logged(said, "try"), "--control-socket")
	require.Equal(t, exitDone, p.terminate())
	require.FileExists(t, path)
}

// TestControlObeysItsUserAndRoot asks in the way of a process of each user. Whoever is refused changes nothing and learns nothing.
func TestControlObeysItsUserAndRoot(t *testing.T) {
	own := uint32(os.Geteuid())
	for name, c := range map[string]struct {
		peer   any // of the connection
		body   string
		status int
		answer string
	}{
		"the own user":        {&unix.Ucred{Uid: own}, `{"action": "open", "lun": 2, "to": "` + second + `"}`, http.StatusOK, `{"done":"LUN 2 is open to ` + second},
		"root":                {&unix.Ucred{Uid: 0}, `{"action": "open", "lun": 2, "to": "` + second + `"}`, http.StatusOK, `{"done":"LUN 2 is open to ` + second},
		"another user":        {&unix.Ucred{Uid: own + 1}, `{"action": "open", "lun": 2, "to": "` + second + `"}`, http.StatusForbidden, `{"error":"only the user of the daemon`},
		"nobody knows who":    {nil, `{"action": "open", "lun": 2, "to": "` + second + `"}`, http.StatusForbidden, `{"error":"only the user of the daemon`},
		"what is refused":     {&unix.Ucred{Uid: own}, `{"action": "finish", "lun": 3}`, http.StatusConflict, `{"error":"not handed over"`},
		"no action":           {&unix.Ucred{Uid: own}, `{"action": "steal", "lun": 2}`, http.StatusConflict, `{"error":"\"steal\" is no action`},
		"a key of the future": {&unix.Ucred{Uid: own}, `{"action": "open", "lun": 2, "to": "` + second + `", "force": true}`, http.StatusBadRequest, `{"error":"the request is not understood`},
		"no JSON":             {&unix.Ucred{Uid: own}, `open`, http.StatusBadRequest, `{"error":"the request is not understood`},
		"far too much":        {&unix.Ucred{Uid: own}, strings.Repeat(" ", 1<<20) + `{}`, http.StatusBadRequest, `{"error":"the request is not understood`},
	} {
		luns := newFakeLUNs()
		core, log := observer.New(zap.InfoLevel)
		request := httptest.NewRequest(http.MethodPost, "/handover", strings.NewReader(c.body))
		if c.peer != nil {
			request = request.WithContext(context.WithValue(request.Context(), peerKey{}, c.peer))
		}
		w := httptest.NewRecorder()
		authorized(newControl(luns, zap.New(core)).handle)(w, request)
		require.Equal(t, c.status, w.Code, name)
		require.Contains(t, w.Body.String(), c.answer, name)
		if c.status == http.StatusOK {
			require.Len(t, luns.opened, 1, name)
			require.Equal(t, 1, log.FilterMessage("handover").FilterField(zap.String("action", "open")).Len(), name)
			continue
		}
		require.Empty(t, luns.opened, name)
		require.Empty(t, log.All(), name)
	}
}

// TestEndOfAHandoverEndsItsTime: who is told that it is finished or cancelled need not fear that its time still runs out, and where that was
// refused, it still does.
func TestEndOfAHandoverEndsItsTime(t *testing.T) {
	for _, action := range []string{"finish", "cancel"} {
		luns := newFakeLUNs()
		c := newControl(luns, zap.NewNop())
		defer c.stopTimers()
		_, err := c.do(t.Context(), openFor(2, time.Hour))
		require.NoError(t, err)
		luns.broken, luns.once = unix.ENOSPC, false
		_, err = c.do(t.Context(), handoverRequest{Action: action, LUN: 2})
		require.ErrorIs(t, err, unix.ENOSPC)
		require.Contains(t, c.openings, uint16(2), action)
		luns.broken = nil
		_, err = c.do(t.Context(), handoverRequest{Action: action, LUN: 2})
		require.NoError(t, err)
		require.Empty(t, c.openings, action)
	}
}

// TestHandoverRunsOut: the log tells who is fenced, or that nobody is.
func TestHandoverRunsOut(t *testing.T) {
	luns := newFakeLUNs()
	core, log := observer.New(zap.InfoLevel)
	c := newControl(luns, zap.New(core))
	for former, said := range map[string]string{"": "nobody is fenced", "iqn.2026-01.test:source": "the former owner is fenced"} {
		luns.owner[2] = former
		_, err := c.do(t.Context(), openFor(2, time.Hour))
		require.NoError(t, err)
		c.expire(2, c.openings[2])
		lines := log.TakeAll()
		require.Len(t, lines, 1)
		require.Contains(t, lines[0].Message, said)
		require.Equal(t, zap.InfoLevel, lines[0].Level)
		require.Equal(t, former, lines[0].ContextMap()["fenced"])
		require.Empty(t, c.openings)
	}
}
