package guestinit

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/internal/testtool"
)

func TestFindProgram(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	for name, mode := range map[string]os.FileMode{"a/tool": 0o755, "a/text": 0o644,
		"b/text": 0o755, "here": 0o755} {
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o755))
		require.NoError(t, os.WriteFile(name, nil, mode))
	}
	require.NoError(t, os.MkdirAll("a/dir", 0o755))
	path := dir + "/none:" + dir + "/a:" + dir + "/b:"
	for name, want := range map[string]string{"tool": dir + "/a/tool", "text": dir + "/b/text",
		"./here": "./here", "a/tool": "a/tool", "here": "./here"} {
		require.Equal(t, want, testtool.Must(findProgram(name, path))(t))
	}
	for name, status := range map[string]int{
		"":        machine.StatusNotFound, // as in a runtime, and not the directory of PATH
		"missing": machine.StatusNotFound, "./missing": machine.StatusNotFound,
		"here/x": machine.StatusNotFound,
		"dir":    machine.StatusExec, "a/text": machine.StatusExec, "a/dir": machine.StatusExec,
	} {
		_, err := findProgram(name, path)
		var start *startError
		require.ErrorAs(t, err, &start, name)
		require.Equal(t, status, start.status, name)
	}
}

// TestExplainExec: the file is there, and the kernel refuses it.
func TestExplainExec(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"interpreter": "#!/no/such\n", "text": "hello",
		"empty": ""} {
		file := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(file, []byte(text), 0o755))
		_, err := syscall.ForkExec(file, []string{file}, nil)
		var start *startError
		require.True(t, errors.As(explainExec(file, err), &start))
		want := machine.StatusExec
		if name == "interpreter" {
			want = machine.StatusNotFound
		}
		require.Equal(t, want, start.status, name)
		require.ErrorContains(t, start, file)
	}
}

func TestParseStageError(t *testing.T) {
	err := parseStageError(`127 "x" is missing`)
	require.Equal(t, &startError{127, errors.New(`"x" is missing`)}, err)
	err = parseStageError("fatal error: x")
	require.Equal(t, &startError{125, errors.New("fatal error: x")}, err)
}

// TestSupervise: the first request to stop sends the stop signal, the second one and the end of the
// time kill; signals for process 1 go to the entry point.
func TestSupervise(t *testing.T) {
	sent := make(chan syscall.Signal, 10)
	requests := make(chan struct{}, 2)
	signals := make(chan os.Signal, 2)
	exited := make(chan unix.WaitStatus, 1)
	s := &supervisor{pid: 7, stop: syscall.SIGQUIT, grace: time.Hour,
		say: func(string, ...any) {}, requests: requests, signals: signals,
		kill: func(pid int, signal syscall.Signal) {
			require.Equal(t, 7, pid)
			sent <- signal
		}}
	done := make(chan ending)
	go func() { done <- s.run(exited, false) }()
	signals <- syscall.SIGHUP
	require.Equal(t, syscall.SIGHUP, <-sent)
	requests <- struct{}{}
	require.Equal(t, syscall.SIGQUIT, <-sent)
	requests <- struct{}{}
	require.Equal(t, syscall.SIGKILL, <-sent)
	exited <- 9
	require.Equal(t, ending{status: 137}, <-done)

	s.grace = time.Millisecond
	go func() { done <- s.run(exited, false) }()
	requests <- struct{}{}
	require.Equal(t, syscall.SIGQUIT, <-sent)
	require.Equal(t, syscall.SIGKILL, <-sent)
	exited <- 5 << 8
	require.Equal(t, ending{status: 5}, <-done)
}
