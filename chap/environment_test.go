package chap

import (
	"encoding/base64"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

const (
	secretA = "0123456789abcdef"
	secretB = "fedcba9876543210"
)

// fromMap runs FromEnvironment with these variables and files.
func fromMap(vars, files map[string]string) (Config, error) {
	return FromEnvironment(
		func(name string) (string, bool) { v, ok := vars[name]; return v, ok },
		func(path string) ([]byte, error) {
			v, ok := files[path]
			if !ok {
				return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
			}
			return []byte(v), nil
		})
}

type vars = map[string]string

func TestFromEnvironmentSources(t *testing.T) {
	alice := Credential{"alice", NewSecret(secretA)}
	storage := Credential{"storage", NewSecret(secretB)}
	std, url := base64.StdEncoding, base64.RawURLEncoding
	odd := "s?>s?>s?>s?>" // its base64 has both characters by which the alphabets differ
	require.NotEqual(t, std.EncodeToString([]byte(odd)), url.EncodeToString([]byte(odd)))
	files := vars{"/u": "alice\n", "/p": secretA + "\n", "/crlf": secretA + "\r\n",
		"/two": secretA + "\n\n", "/bare": secretA, "/mu": "storage", "/mp": secretB,
		"/name": "iqn.2001-04.com.example:a\n"}
	for _, tt := range []struct {
		name string
		vars vars
		want Config
	}{
		{"nothing", vars{}, Config{}},
		{"all empty", vars{"CHAP_USERNAME": "", "CHAP_PASSWORD": "", "USERNAME": "", "PASSWORD": "",
			"CHAP_PASSWORD_FILE": "",
			"USERNAME_BASE64":    "", "PASSWORD_BASE64": "", "node.session.auth.username": "",
			"CHAP_INITIATOR_NAME": ""}, Config{}},
		{"CHAP", vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD": secretA},
			Config{Initiator: alice}},
		{"files", vars{"CHAP_USERNAME_FILE": "/u", "CHAP_PASSWORD_FILE": "/p"},
			Config{Initiator: alice}},
		{"file and variable", vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD_FILE": "/bare"},
			Config{Initiator: alice}},
		{"CRLF in a file", vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD_FILE": "/crlf"},
			Config{Initiator: alice}},
		{"file and variable agree",
			vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD": secretA, "CHAP_PASSWORD_FILE": "/p"},
			Config{Initiator: alice}},
		{"mutual", vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD": secretA,
			"CHAP_MUTUAL_USERNAME": "storage", "CHAP_MUTUAL_PASSWORD": secretB},
			Config{Initiator: alice, Target: storage}},
		{"mutual files", vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD": secretA,
			"CHAP_MUTUAL_USERNAME_FILE": "/mu", "CHAP_MUTUAL_PASSWORD_FILE": "/mp"},
			Config{Initiator: alice, Target: storage}},
		{"original", vars{"USERNAME": "alice", "PASSWORD": secretA}, Config{Initiator: alice}},
		{"of a desktop", vars{"USERNAME": "alice"}, Config{}},
		{"original base64", vars{"USERNAME_BASE64": std.EncodeToString([]byte("alice")),
			"PASSWORD_BASE64": std.EncodeToString([]byte(secretA))},
			Config{Initiator: alice}},
		{"base64 wins", vars{"USERNAME": "bob", "PASSWORD": "another password",
			"USERNAME_BASE64": std.EncodeToString([]byte("alice")),
			"PASSWORD_BASE64": std.EncodeToString([]byte(secretA))}, Config{Initiator: alice}},
		{"base64 wins one by one",
			vars{"USERNAME": "alice", "PASSWORD": "another password", "USERNAME_BASE64": "",
				"PASSWORD_BASE64": std.EncodeToString([]byte(secretA))}, Config{Initiator: alice}},
		{"base64 of a line", vars{"USERNAME_BASE64": std.EncodeToString([]byte("alice\n")),
			"PASSWORD_BASE64": std.EncodeToString([]byte(secretA+"\n")) + "\n"},
			Config{Initiator: alice}},
		{"standard alphabet", vars{"USERNAME": "alice",
			"PASSWORD_BASE64": std.EncodeToString([]byte(odd))},
			Config{Initiator: Credential{"alice", NewSecret(odd)}}},
		{"URL alphabet", vars{"USERNAME": "alice",
			"PASSWORD_BASE64": url.EncodeToString([]byte(odd))},
			Config{Initiator: Credential{"alice", NewSecret(odd)}}},
		{"kubernetes", vars{"node.session.auth.username": "alice",
			"node.session.auth.password": secretA}, Config{Initiator: alice}},
		{"kubernetes mutual", vars{"node.session.auth.username": "alice",
			"node.session.auth.password":    secretA,
			"node.session.auth.username_in": "storage", "node.session.auth.password_in": secretB},
			Config{Initiator: alice, Target: storage}},
		{"all agree", vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD": secretA, "USERNAME": "alice",
			"PASSWORD":                   secretA,
			"node.session.auth.username": "alice", "node.session.auth.password": secretA},
			Config{Initiator: alice}},
		{"sources by direction",
			vars{"USERNAME": "alice", "PASSWORD": secretA, "CHAP_MUTUAL_USERNAME": "storage",
				"CHAP_MUTUAL_PASSWORD": secretB},
			Config{Initiator: alice, Target: storage}},
		{"bound", vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD": secretA,
			"CHAP_INITIATOR_NAME": "iqn.2001-04.com.example:a"},
			Config{Initiator: alice, InitiatorName: "iqn.2001-04.com.example:a"}},
		{"bound by a file", vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD": secretA,
			"CHAP_INITIATOR_NAME_FILE": "/name"},
			Config{Initiator: alice, InitiatorName: "iqn.2001-04.com.example:a"}},
	} {
		got := testtool.Must(fromMap(tt.vars, files))(t, tt.name)
		require.Equal(t, tt.want, got, tt.name)
		require.Equal(t, !tt.want.Initiator.IsZero(), got.Enabled(), tt.name)
		require.Equal(t, !tt.want.Target.IsZero(), got.Mutual(), tt.name)
	}
}

func TestFromEnvironmentRefuses(t *testing.T) {
	files := vars{"/empty": "", "/line": "\n", "/two": secretA + "\n\n", "/cr": secretA + "\r",
		"/other": secretB}
	good := func(more vars) vars {
		v := vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD": secretA}
		maps.Copy(v, more)
		return v
	}
	for _, tt := range []struct {
		name string
		vars vars
		want []string // parts of the error
	}{
		{"no password", vars{"CHAP_USERNAME": "alice"}, []string{"CHAP_USERNAME", "CHAP_PASSWORD"}},
		{"no user", vars{"CHAP_PASSWORD": secretA}, []string{"CHAP_USERNAME", "CHAP_PASSWORD"}},
		{"empty password", vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD": ""},
			[]string{"CHAP_PASSWORD is not"}},
		{"original without user", vars{"PASSWORD_BASE64": "MDEyMzQ1Njc4OWFiY2RlZg=="},
			[]string{"PASSWORD_BASE64", "USERNAME"}},
		{"kubernetes half", vars{"node.session.auth.username": "alice"},
			[]string{"node.session.auth.username", "node.session.auth.password"}},
		{"kubernetes half mutual", good(vars{"node.session.auth.password_in": secretB}),
			[]string{"node.session.auth.password_in", "node.session.auth.username_in"}},
		{"halves of two sources", vars{"CHAP_USERNAME": "alice", "PASSWORD": secretA},
			[]string{"CHAP_USERNAME", "CHAP_PASSWORD", "USERNAME", "PASSWORD"}},
		{"half beside a whole", good(vars{"USERNAME_BASE64": "YWxpY2U="}),
			[]string{"USERNAME_BASE64", "PASSWORD"}},
		{"passwords differ", good(vars{"USERNAME": "alice", "PASSWORD": secretB}),
			[]string{"CHAP_USERNAME and CHAP_PASSWORD", "USERNAME and PASSWORD", "disagree"}},
		{"users differ", good(vars{"node.session.auth.username": "bob",
			"node.session.auth.password": secretA}),
			[]string{"CHAP_USERNAME", "node.session.auth.username", "disagree"}},
		{"mutual sources differ",
			good(vars{"CHAP_MUTUAL_USERNAME": "t", "CHAP_MUTUAL_PASSWORD": secretB,
				"node.session.auth.username_in": "u", "node.session.auth.password_in": secretB}),
			[]string{"CHAP_MUTUAL_USERNAME", "node.session.auth.username_in", "disagree"}},
		{"file and variable differ", good(vars{"CHAP_PASSWORD_FILE": "/other"}),
			[]string{"CHAP_PASSWORD_FILE", "CHAP_PASSWORD disagree"}},
		{"bound by an empty file", good(vars{"CHAP_INITIATOR_NAME_FILE": "/empty"}),
			[]string{"CHAP_INITIATOR_NAME_FILE", "empty"}},
		{"short", vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD": "shortsecret"},
			[]string{"CHAP_PASSWORD", "12 bytes"}},
		{"short original", vars{"USERNAME": "alice", "PASSWORD": "shortsecret"},
			[]string{"PASSWORD", "12 bytes"}},
		{"short mutual",
			good(vars{"CHAP_MUTUAL_USERNAME": "t", "CHAP_MUTUAL_PASSWORD": "shortsecret"}),
			[]string{"CHAP_MUTUAL_PASSWORD", "12 bytes"}},
		{"long", vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD": strings.Repeat("s", 256)},
			[]string{"CHAP_PASSWORD", "255"}},
		{"long user", vars{"CHAP_USERNAME": strings.Repeat("u", 256), "CHAP_PASSWORD": secretA},
			[]string{"CHAP_USERNAME", "255"}},
		{"control", vars{"CHAP_USERNAME": "alice\t", "CHAP_PASSWORD": secretA + "\x00"},
			[]string{"CHAP_USERNAME contains", "CHAP_PASSWORD contains"}},
		{"a bare CR", vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD_FILE": "/cr"},
			[]string{"CHAP_PASSWORD_FILE", "control"}},
		{"two newlines", vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD_FILE": "/two"},
			[]string{"CHAP_PASSWORD_FILE", "newline"}},
		{"same secret", good(vars{"CHAP_MUTUAL_USERNAME": "t", "CHAP_MUTUAL_PASSWORD": secretA}),
			[]string{"CHAP_PASSWORD", "CHAP_MUTUAL_PASSWORD", "same secret"}},
		{"only mutual", vars{"CHAP_MUTUAL_USERNAME": "t", "CHAP_MUTUAL_PASSWORD": secretB},
			[]string{"CHAP_MUTUAL_USERNAME", "CHAP_MUTUAL_PASSWORD", "CHAP_USERNAME"}},
		{"only kubernetes mutual",
			vars{"node.session.auth.username_in": "t", "node.session.auth.password_in": secretB},
			[]string{"node.session.auth.username_in"}},
		{"not base64", vars{"USERNAME": "alice", "PASSWORD_BASE64": "!!!"},
			[]string{"PASSWORD_BASE64", "base64"}},
		{"a good beginning is not base64",
			vars{"USERNAME": "alice", "PASSWORD_BASE64": "MDEyMzQ1Njc4OWFiY2RlZg!!"},
			[]string{"PASSWORD_BASE64 is not base64"}},
		{"nothing in base64", vars{"USERNAME": "alice", "PASSWORD_BASE64": "Cg=="},
			[]string{"PASSWORD_BASE64", "nothing"}},
		{"no such file", vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD_FILE": secretA},
			[]string{"CHAP_PASSWORD_FILE", "not exist"}},
		{"empty file", vars{"CHAP_USERNAME_FILE": "/empty", "CHAP_PASSWORD_FILE": "/line"},
			[]string{"CHAP_USERNAME_FILE", "CHAP_PASSWORD_FILE", "empty"}},
		{"bound to nothing", vars{"CHAP_INITIATOR_NAME": "iqn.2001-04.com.example:a"},
			[]string{"CHAP_INITIATOR_NAME", "CHAP_USERNAME"}},
		{"bad binding", good(vars{"CHAP_INITIATOR_NAME": "iqn a"}),
			[]string{"CHAP_INITIATOR_NAME", "space"}},
		{"user as binding", good(vars{"CHAP_INITIATOR_NAME": "alice"}),
			[]string{"CHAP_INITIATOR_NAME is not an iSCSI name", "iqn.1994-05.com.example:host"}},
	} {
		got, err := fromMap(tt.vars, files)
		require.Error(t, err, tt.name)
		require.Equal(t, Config{}, got, tt.name)
		for _, part := range tt.want {
			require.ErrorContains(t, err, part, tt.name)
		}
		for _, value := range []string{secretA, secretB, "shortsecret", "alice"} {
			require.NotContains(t, err.Error(), value, tt.name)
		}
	}
}

// TestFromEnvironmentReportsOnce: a variable that is set to a bad value is not reported as missing
// too.
func TestFromEnvironmentReportsOnce(t *testing.T) {
	mutual := vars{"CHAP_MUTUAL_USERNAME": "t", "CHAP_MUTUAL_PASSWORD": secretB,
		"CHAP_INITIATOR_NAME": "iqn.2001-04.com.example:a"}
	for _, tt := range []struct {
		vars vars
		want string
	}{
		{vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD": "shortsecret"},
			"CHAP_PASSWORD is shorter than 12 bytes, which is not safe for CHAP; use a longer, " +
				"random one"},
		{vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD_FILE": "/none"},
			"CHAP_PASSWORD_FILE names a file (not shown, as it may be a secret in the wrong " +
				"variable) that cannot be read: file does not exist"},
		{vars{"CHAP_USERNAME_FILE": "/none", "CHAP_PASSWORD": secretA},
			"CHAP_USERNAME_FILE names a file (not shown, as it may be a secret in the wrong " +
				"variable) that cannot be read: file does not exist"},
		{vars{"USERNAME": "alice", "PASSWORD_BASE64": "!!!"}, "PASSWORD_BASE64 is not base64"},
	} {
		maps.Copy(tt.vars, mutual)
		require.EqualError(t, testtool.Err(fromMap(tt.vars, nil)), tt.want)
	}
}

func TestFromEnvironmentUnreadableFile(t *testing.T) {
	broken := errors.New("disk on fire")
	_, err := FromEnvironment(func(name string) (string, bool) {
		return "x", name == "CHAP_USERNAME_FILE"
	},
		func(string) ([]byte, error) { return nil, broken })
	require.ErrorIs(t, err, broken)
	require.ErrorContains(t, err, "CHAP_USERNAME_FILE")
}

// TestFromEnvironmentNamesFiles: an error shows a path that can only be a file's, and hides one
// that may be a secret.
func TestFromEnvironmentNamesFiles(t *testing.T) {
	dir := t.TempDir()
	there := filepath.Join(dir, "a b")
	require.NoError(t, os.WriteFile(there, []byte("\n"), 0o600))
	for path, want := range map[string]string{
		filepath.Join(dir, "none", "password"): `CHAP_PASSWORD_FILE names the file "` + dir +
			`/none/password" that cannot be read: no such file or directory`,
		dir: `CHAP_PASSWORD_FILE names the file "` + dir +
			`" that cannot be read: is a directory`,
		there: `CHAP_PASSWORD_FILE names the file "` + there +
			`", which is empty`,
	} {
		_, err := FromEnvironment(func(name string) (string, bool) {
			v, ok := vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD_FILE": path}[name]
			return v, ok
		}, os.ReadFile)
		require.EqualError(t, err, want)
	}
	for _, secret := range []string{secretA, "/" + secretA, "/Zm9v/" + secretA, "./" + secretA,
		"../" + secretA} {
		_, err := FromEnvironment(func(name string) (string, bool) {
			v, ok := vars{"CHAP_USERNAME": "alice", "CHAP_PASSWORD_FILE": secret}[name]
			return v, ok
		}, os.ReadFile)
		require.ErrorContains(t, err, "CHAP_PASSWORD_FILE names a file (not shown")
		require.NotContains(t, err.Error(), secretA)
	}
}
