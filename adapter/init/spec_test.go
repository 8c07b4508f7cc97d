package guestinit

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/internal/testtool"
)

const webConfig = `{"architecture":"amd64","config":{"User":"www","Env":["PATH=/bin","A=1"],
"Entrypoint":["/web"],"Cmd":["--port","80"],"WorkingDir":"/srv","StopSignal":"SIGQUIT",
"Volumes":{"/data":{},"relative":{}}},"rootfs":{}}`

// configured is a disk with a configuration.
func configured(config, options string) io.ReaderAt {
	text := `{"image":` + config
	if options != "" {
		text += `,"extra":` + options
	}
	return onDisk(text + "}")
}

type onDisk string

func (d onDisk) ReadAt(p []byte, off int64) (int, error) {
	clear(p)
	if at := off - machine.ConfigOffset; at < int64(len(d)) {
		copy(p, d[at:])
	}
	return len(p), nil
}

func TestReadProcess(t *testing.T) {
	p, _ := testtool.Must2(readProcess(configured(webConfig, ""), params{}))(t)
	require.Equal(t, process{Args: []string{"/web", "--port", "80"},
		Env: []string{"PATH=/bin", "A=1"}, User: "www", Dir: "/srv", Volumes: []string{"/data"},
		StopSignal: syscall.SIGQUIT, stopGiven: true}, p)

	p, options := testtool.Must2(readProcess(configured(webConfig, `{"entrypoint":["sh"],
"env":["A=2","B=3"],"user":"0","workDir":"tmp","stopSignal":"TERM","hostname":"h"}`),
		params{tty: true}))(t)
	require.Equal(t, process{Args: []string{"sh"}, TTY: true,
		Env:  []string{"TERM=xterm", "PATH=/bin", "A=2", "B=3"},
		User: "0", Dir: "/tmp", Volumes: []string{"/data"}, StopSignal: syscall.SIGTERM,
		stopGiven: true}, p)
	require.Equal(t, "h", options.Hostname)

	p, _ = testtool.Must2(readProcess(configured(webConfig, `{"args":["--help"]}`), params{}))(t)
	require.Equal(t, []string{"/web", "--help"}, p.Args)
}

// TestEmptyEntryPoint: an entry point of one empty word removes the image's, as in container
// runtimes. Without arguments nothing is left, which is status 127.
func TestEmptyEntryPoint(t *testing.T) {
	p, _, err := readProcess(configured(webConfig, `{"entrypoint":[""],"args":["sh"]}`), params{})
	require.NoError(t, err)
	require.Equal(t, []string{"sh"}, p.Args)
	for config, options := range map[string]string{webConfig: `{"entrypoint":[""]}`,
		`{"config":{}}`: `{}`} {
		_, _, err = readProcess(configured(config, options), params{})
		var start *startError
		require.ErrorAs(t, err, &start)
		require.Equal(t, machine.StatusNotFound, start.status)
	}
}

func TestReadProcessRefuses(t *testing.T) {
	for _, c := range []struct{ config, options, want string }{
		{"no JSON", "", "cannot be read: "},
		{webConfig, "no JSON", "cannot be read: "},
		{`{"config":{}}`, "", "no entry point and no command"},
		{`{"config":{"Cmd":["x"],"StopSignal":"SIGWHAT"}}`, "", `"SIGWHAT" is unknown`},
	} {
		_, _, err := readProcess(configured(c.config, c.options), params{})
		require.ErrorContains(t, err, c.want)
	}
	for _, disk := range []io.ReaderAt{onDisk(""), strings.NewReader("a small disk")} {
		_, _, err := readProcess(disk, params{})
		require.ErrorContains(t, err, "made by kubevirt-disk adapt?")
	}
	long := strings.Repeat("x", machine.ConfigSize-1000)
	p, _, err := readProcess(configured(`{"config":{"Cmd":["`+long+`"]}}`, ""), params{})
	require.NoError(t, err)
	require.Equal(t, long, p.Args[0], "it is read in pieces")
}

// TestRecogniseInit: an init system becomes process 1, and systemd is asked to power off by a
// signal of its own.
func TestRecogniseInit(t *testing.T) {
	root := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(root, "usr/sbin"), 0o755))
	require.NoError(t, os.Symlink("usr/sbin", filepath.Join(root, "sbin")))
	require.NoError(t, os.Symlink("../lib/systemd/systemd", filepath.Join(root, "usr/sbin/init")))
	require.NoError(t, os.Symlink("/sbin/init", filepath.Join(root, "boot")))
	require.NoError(t, os.Symlink("round", filepath.Join(root, "round")))
	for program, want := range map[string]process{
		"/sbin/init": {Init: true, StopSignal: 38}, "/boot": {Init: true, StopSignal: 38},
		"/usr/bin/tini": {Init: true}, "tini": {Init: true}, "/web": {}, "init.sh": {},
		"/round": {},
	} {
		p := process{Args: []string{program}}
		p.recogniseInit(root)
		want.Args = p.Args
		require.Equal(t, want, p)
	}
	p := process{Args: []string{"/sbin/init"}, StopSignal: syscall.SIGPWR, stopGiven: true}
	p.recogniseInit(root)
	require.Equal(t, syscall.SIGPWR, p.StopSignal)
}

func FuzzReadProcess(f *testing.F) {
	f.Add(webConfig, `{"env":["A=2"]}`)
	f.Add(webConfig, `{"env":["PATH="]}`)
	f.Fuzz(func(t *testing.T, config, options string) {
		p, _, err := readProcess(configured(config, options), params{})
		if err == nil {
			require.NotEmpty(t, p.Args)
			require.NotZero(t, p.StopSignal)
			require.True(t, filepath.IsAbs(p.Dir))
			// It may be empty: an image may say so.
			require.True(t, slices.ContainsFunc(p.Env, func(v string) bool {
				return strings.HasPrefix(v, "PATH=")
			}))
		}
	})
}

const (
	passwdFile = "root:x:0:0:root:/root:/bin/sh\n" +
		"# comment\nbad\nwww:x:33:33:www:/var/www:/bin/false\nbare:x:70000:70001\n"
	groupFile = "root:x:0:\nwww:x:33:\nadm:x:4:www,bare\nlog:x:5:bare,www\nother:x:6:wwwx\n" +
		"twice:x:4:www\n"
)

func TestFindUser(t *testing.T) {
	for spec, want := range map[string]identity{
		"":          {home: "/root"},
		"root":      {home: "/root"},
		"www":       {uid: 33, gid: 33, groups: []int{4, 5}, home: "/var/www"},
		"33":        {uid: 33, gid: 33, groups: []int{4, 5}, home: "/var/www"},
		"www:":      {uid: 33, gid: 33, groups: []int{4, 5}, home: "/var/www"},
		"www:log":   {uid: 33, gid: 5, home: "/var/www"},
		"www:77":    {uid: 33, gid: 77, home: "/var/www"},
		"bare":      {uid: 70000, gid: 70001, groups: []int{4, 5}, home: "/"},
		"4000:4001": {uid: 4000, gid: 4001, home: "/"},
		"4000":      {uid: 4000, home: "/"},
	} {
		require.Equal(t, want, testtool.Must(findUser(spec, passwdFile, groupFile))(t), spec)
	}
	_, err := findUser("nobody", passwdFile, groupFile)
	require.ErrorContains(t, err, `user "nobody" is not in its /etc/passwd`)
	_, err = findUser("www:nobody", passwdFile, groupFile)
	require.ErrorContains(t, err, `group "nobody" is not in its /etc/group`)
	id := testtool.Must(findUser("", "", ""))(t)
	require.Equal(t, identity{home: "/root"}, id, "an image without passwd")
}

func FuzzFindUser(f *testing.F) {
	f.Add("www:log", passwdFile, groupFile)
	f.Fuzz(func(t *testing.T, spec, passwd, group string) {
		id, err := findUser(spec, passwd, group)
		if err == nil {
			require.True(t, id.uid >= 0 && id.uid <= maxID && id.gid >= 0 && id.gid <= maxID)
		}
	})
}
