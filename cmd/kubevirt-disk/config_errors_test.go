package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/internal/testtool"
)

// TestConfigurationErrors checks that the message about each mistake names the place to change and
// what to do.
func TestConfigurationErrors(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		env  map[string]string
		file string
		want []string // parts of the message
	}{
		"port is no number": {args: []string{"--port=abc"},
			want: []string{"--port", `"abc"`, "0 to 65535"}},
		"key is missing": {args: []string{"--verify-key=/gone"},
			want: []string{"--verify-key", "/gone", "no such file"}},
		"key and policy": {args: []string{"--verify-key=testdata/signatures/flag.pub"},
			env: map[string]string{
				"SIGNATURE_POLICY": "testdata/signatures/environment.yaml"},
			want: []string{"environment.yaml", "both given"}},
		"policy is none": {env: map[string]string{
			"SIGNATURE_POLICY": "testdata/signatures/flag.pub"},
			want: []string{"SIGNATURE_POLICY", "flag.pub"}},
		"port is too large": {env: map[string]string{"PORT": "65536"},
			want: []string{"PORT", `"65536"`}},
		"port is negative": {file: "port: -1",
			want: []string{`"port" in `, "config.yaml", `"-1"`}},
		"port is a list": {file: "port: [1, 2]",
			want: []string{"line 1", `"port"`, "single value"}},
		"port contradicts the portal": {args: []string{"--listen=127.0.0.1:4000"},
			env:  map[string]string{"PORT": "3261"},
			want: []string{"--listen", "PORT", "127.0.0.1:4000", "3261"}},
		"portal is not an address": {args: []string{"--listen=3260"},
			want: []string{"--listen", `"3260"`, "0.0.0.0:3260"}},
		"portal is a name": {env: map[string]string{
			"LISTEN": "disk.example.com:3260"},
			want: []string{"LISTEN", "disk.example.com", "IP address"}},
		"portal has a wrong port": {args: []string{"--listen=[::1]:99999"},
			want: []string{"--listen", "99999"}},
		"portal is empty": {args: []string{"--listen="},
			want: []string{"--listen", "empty"}},
		"portal in the file is a mapping": {file: "listen: {a: b}",
			want: []string{`"listen"`, "list of texts"}},
		"portal in the file is nothing": {file: "listen: [127.0.0.1, null]",
			want: []string{`"listen"`, "list of texts"}},
		"portal in the file is nested": {file: "listen: [[a]]",
			want: []string{`"listen"`, "list of texts"}},
		"beyond loopback without CHAP": {args: []string{"--listen=0.0.0.0:3260"},
			want: []string{"--listen", "0.0.0.0:3260", "CHAP_USERNAME", "CHAP_PASSWORD",
				"INSECURE_NO_AUTH"}},
		"every address without CHAP": {env: map[string]string{"LISTEN": ":3260"},
			want: []string{"LISTEN", "CHAP_USERNAME"}},
		"IPv6 beyond loopback, no CHAP": {file: "listen: ['::1', '::']",
			want: []string{`"listen" in `, "[::]:3260", "CHAP_USERNAME"}},
		"insecure is no bool": {env: map[string]string{"INSECURE_NO_AUTH": "perhaps"},
			want: []string{"INSECURE_NO_AUTH", "perhaps", "true nor false"}},
		"target name is not one": {args: []string{"--target-name=disk1"},
			want: []string{"--target-name", "disk1", "iqn."}},
		"target name by the old variable": {env: map[string]string{"WWN": "iqn.bad"},
			want: []string{"WWN", "iqn.bad"}},
		"target names disagree": {env: map[string]string{"WWN": "iqn.2020-01.a",
			"TARGET_NAME": "iqn.2020-01.b"}, want: []string{"WWN", "TARGET_NAME", "disagree"}},
		"target name is empty": {file: `target-name: ""`,
			want: []string{`"target-name"`, "empty"}},
		"copy mode is unknown": {args: []string{"--copy-mode=fast"},
			want: []string{"--copy-mode", "fast", "clone"}},
		"on image change": {args: []string{"--on-image-change=overwrite"},
			want: []string{"--on-image-change", "overwrite", "fail or keep"}},
		"size": {env: map[string]string{"SIZE": "10 GB"},
			want: []string{"SIZE", "10 GB", "Gi"}},
		"size of half sectors": {args: []string{"--size=1000"},
			want: []string{"--size", "multiple of 512"}},
		"ephemeral flush": {env: map[string]string{"EPHEMERAL_FLUSH": "perhaps"},
			want: []string{"EPHEMERAL_FLUSH", "perhaps"}},
		"no sessions": {env: map[string]string{"MAX_SESSIONS": "0"},
			want: []string{"MAX_SESSIONS", "from 1 to 65535"}},
		"sessions without a handle": {env: map[string]string{"MAX_SESSIONS": "65536"},
			want: []string{"MAX_SESSIONS", "65536", "from 1 to 65535"}},
		"memory": {args: []string{"--memory=lots"},
			want: []string{"--memory", "lots"}},
		"memory for no command": {env: map[string]string{"MEMORY": "1Mi"},
			want: []string{"MEMORY", "1Mi", "at least 4Mi"}},
		"disks is no map": {file: "disks: [a.raw]",
			want: []string{"line 1", "fedora.qcow2"}},
		"disk is no map": {file: "disks: {a.raw: 3}",
			want: []string{"a.raw", "key: value"}},
		"disk set up twice": {file: "disks:\n  a.raw: {lun: 3}\n  a.raw: {lun: 4}\n",
			want: []string{"line 3", "a.raw", "twice"}},
		"unknown disk setting": {file: "disks: {a.raw: {lunn: 3}}",
			want: []string{"a.raw", "lunn", "copy-mode, format, lun"}},
		"disk setting twice": {file: "disks: {a.raw: {lun: 3, lun: 4}}",
			want: []string{"lun", "twice"}},
		"disk setting empty": {file: "disks: {a.raw: {lun: }}",
			want: []string{"lun", "single value"}},
		"access mode is unknown": {args: []string{"--access-mode=all"},
			want: []string{"--access-mode", "all", "write-shared"}},
		"metrics address is none": {env: map[string]string{"METRICS_LISTEN": "pages"},
			want: []string{"METRICS_LISTEN", "pages"}},
		"log level is unknown": {env: map[string]string{"LOG_LEVEL": "loud"},
			want: []string{"LOG_LEVEL", "loud", "debug"}},
		"log format is unknown": {args: []string{"--log-format=xml"},
			want: []string{"--log-format", "xml", "console"}},
		"directory is empty": {args: []string{"--disk-dir="},
			want: []string{"--disk-dir", "empty"}},
		"unknown keys": {file: "port: 1\ndisc: /x\ncopies: 3\n",
			want: []string{"--config", `"disc"`, "line 2", `"copies"`, "line 3"}},
		"another spelling of a key": {file: "disk_dir: /x",
			want: []string{`"disk_dir"`, `write "disk-dir"`}},
		"a key in upper case": {file: "Disk-Dir: /x",
			want: []string{`"Disk-Dir"`, `write "disk-dir"`}},
		"a key twice": {file: "port: 1\nport: 2\n",
			want: []string{`"port"`, "twice"}},
		"a key without a value": {file: "port:\n",
			want: []string{`"port" has no value: give it one`}},
		"pages without a value": {file: "metrics-listen:\n",
			want: []string{`"metrics-listen"`, `write ""`}},
		"no YAML": {file: "port: [1",
			want: []string{"not YAML", "line 1", "did not find"}},
		"an alias": {file: "target-name: &a x\ncopy-mode: *a",
			want: []string{"line 2", "put it in quotes"}},
		"an alias of nothing": {file: "target-name: *name",
			want: []string{"not YAML", "put it in quotes"}},
		"disks twice": {file: "disks: {a.raw: {lun: 3}}\ndisks: {a.raw: " +
			"{lun: 4}}\n", want: []string{"line 2", `"disks"`, "set twice"}},
		"a credential in the file": {file: "username: alice",
			want: []string{`"username" is not a setting`, "CHAP_USERNAME"}},
		"a list instead of settings": {file: "- port\n", want: []string{"key: value"}},
		"two documents": {file: "port: 1\n---\nport: 2\n",
			want: []string{"more than one"}},
		"no file": {env: map[string]string{
			settings.EnvConfig: "/does/not/exist.yaml"},
			want: []string{settings.EnvConfig, "/does/not/exist.yaml", "no such file"}},
		"an empty name of the file": {args: []string{"--config="},
			env:  map[string]string{settings.EnvConfig: "/dev/null"},
			want: []string{"--config: is empty: name a file"}},
		"half a credential": {env: map[string]string{"CHAP_USERNAME": "user"},
			want: []string{"CHAP_USERNAME", "CHAP_PASSWORD"}},
		"a short secret": {env: map[string]string{"CHAP_USERNAME": "user",
			"CHAP_PASSWORD": "elevenbytes"}, want: []string{"CHAP_PASSWORD", "12"}},
		"a secret file that is not there": {env: map[string]string{"CHAP_USERNAME": "user",
			"CHAP_PASSWORD_FILE": "/does/not/exist"},
			want: []string{"CHAP_PASSWORD_FILE", "no such file"}},
	} {
		t.Run(name, func(t *testing.T) {
			cleanEnv(t)
			for k, v := range c.env {
				t.Setenv(k, v)
			}
			args := c.args
			if c.file != "" {
				args = append(args, "--config="+yamlFile(t, c.file))
			}
			_, err := tryConfig(args...)
			var wrong *problems.Error
			require.ErrorAs(t, err, &wrong)
			for _, part := range c.want {
				require.Contains(t, err.Error(), part)
			}
		})
	}
}

func TestEveryErrorIsReportedAtOnce(t *testing.T) {
	cleanEnv(t)
	t.Setenv("COPY_MODE", "fast")
	t.Setenv("CHAP_USERNAME", "user")
	t.Setenv("CHAP_MUTUAL_PASSWORD", "also half a credential")
	_, err := tryConfig("--port=x", "--log-level=loud",
		"--config="+yamlFile(t, "unknown: 1\ntarget-name: disk\n"))
	var wrong *problems.Error
	require.ErrorAs(t, err, &wrong)
	require.Len(t, wrong.Unwrap(), 7, "%v", err)
	for _, part := range []string{"COPY_MODE", "CHAP_PASSWORD", "CHAP_MUTUAL_USERNAME", "--port",
		"--log-level", `"unknown"`, `"target-name" in`, "7 errors"} {
		require.Contains(t, err.Error(), part)
	}
	require.Len(t, strings.Split(err.Error(), "\n"), 8, "a line each, and the heading")
}

// TestErrorsHaveNoSecrets puts secrets in wrong places, as people do by mistake.
func TestErrorsHaveNoSecrets(t *testing.T) {
	for name, c := range map[string]struct {
		env  map[string]string
		file string
	}{
		"in the file":           {file: "chap-password: " + testSecret + "\n"},
		"in the file, nested":   {file: "chap:\n  password: " + testSecret + "\n"},
		"as an anchor":          {file: "chap-password: *" + testSecret + "\n"},
		"as the file's content": {file: testSecret},
		"too short": {env: map[string]string{"CHAP_USERNAME": "u",
			"CHAP_PASSWORD": testSecret[:11]}},
		"without a username": {env: map[string]string{"CHAP_PASSWORD": testSecret}},
		"two that disagree": {env: map[string]string{"CHAP_USERNAME": "u",
			"CHAP_PASSWORD": testSecret, "USERNAME": "u", "PASSWORD": testSecret + "2"}},
		"as the name of a file": {env: map[string]string{"CHAP_USERNAME": "u",
			"CHAP_PASSWORD_FILE": testSecret}},
		"that is no base64": {env: map[string]string{"USERNAME_BASE64": "dQ==",
			"PASSWORD_BASE64": testSecret + "%"}},
		"the same both ways": {env: map[string]string{"CHAP_USERNAME": "u",
			"CHAP_PASSWORD": testSecret, "CHAP_MUTUAL_USERNAME": "t",
			"CHAP_MUTUAL_PASSWORD": testSecret}},
		"with another thing bad": {env: map[string]string{"CHAP_USERNAME": "u",
			"CHAP_PASSWORD": testSecret, "PORT": "x"}},
	} {
		t.Run(name, func(t *testing.T) {
			cleanEnv(t)
			for k, v := range c.env {
				t.Setenv(k, v)
			}
			var args []string
			if c.file != "" {
				args = append(args, "--config="+yamlFile(t, c.file))
			}
			_, err := tryConfig(args...)
			require.Error(t, err)
			require.NotContains(t, err.Error(), testSecret[:11])
		})
	}
}

func TestConfigFileIsBounded(t *testing.T) {
	cleanEnv(t)
	_, err := tryConfig("--config=" + yamlFile(t, strings.Repeat("#", osfile.MaxText+1)))
	require.ErrorContains(t, err, "larger than")
	require.ErrorContains(t, testtool.Err(tryConfig("--config=/dev/zero")), "larger than")
	_, err = tryConfig("--config=" + filepath.Dir(t.TempDir()))
	require.ErrorContains(t, err, "cannot be read")
}

// TestPipesWithoutEnd names pipes that nobody writes to, or that nobody closes. The start fails
// with a message about them.
func TestPipesWithoutEnd(t *testing.T) {
	l := newPlace(t, "a.raw")
	silent, open := filepath.Join(l.dir, "silent"), filepath.Join(l.dir, "open")
	for _, path := range []string{silent, open} {
		require.NoError(t, syscall.Mkfifo(path, 0o600))
	}
	writer := testtool.Must(os.OpenFile(open, os.O_RDWR, 0))(t)
	defer writer.Close()
	require.NoError(t, testtool.Err(writer.WriteString("port: 0\n")))
	ends := map[string]*process{
		"--config": launch(t, binary(t), l.env, "serve", "--config="+silent),
		settings.EnvConfig: launch(t, binary(t),
			append(l.env, settings.EnvConfig+"="+open), "serve"),
		"CHAP_PASSWORD_FILE ": launch(t, binary(t),
			append(l.env, "CHAP_USERNAME=u", "CHAP_PASSWORD_FILE="+silent), "serve"),
	}
	for source, p := range ends {
		require.Equal(t, exitUsage, p.status(), source)
		require.Contains(t, p.stderr.String(), source)
		require.Contains(t, p.stderr.String(), "it did not end within 10s")
	}
}

// TestPipes reads the pipes of a shell's process substitution, open at /dev/fd. Their writer may
// have gone, or may write late.
func TestPipes(t *testing.T) {
	for name, write := range map[string]func(func()){"written before": func(f func()) { f() },
		"written meanwhile": func(f func()) { go f() }} {
		t.Run(name, func(t *testing.T) {
			r, w := testtool.Must2(os.Pipe())(t)
			defer r.Close()
			write(func() {
				_, err := w.WriteString(testSecret)
				assert.NoError(t, errors.Join(err, w.Close()))
			})
			files, path := settings.NewRereader(), fmt.Sprintf("/dev/fd/%d", r.Fd())
			for range 2 {
				text := testtool.Must(files.Read(path))(t)
				require.Equal(t, testSecret, string(text), "also when it is asked for again")
			}
		})
	}
}

func TestHintsForUnknownKeys(t *testing.T) {
	for key, want := range map[string]string{
		"disk_dir": `: write "disk-dir"`, "Metrics-Listen": `: write "metrics-listen"`,
		"disk-dir": "", "Disk_Folder": "", "folder": "",
		"copy-mod": " (did you mean copy-mode?)", "Log_Leval": " (did you mean log-level?)",
		"chap_password": ": " + credentialsHint, "Username": ": " + credentialsHint,
	} {
		require.Equal(t, want, unknownKeyHint(key, knownSettings()), key)
	}
}
