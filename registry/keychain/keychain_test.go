package keychain

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/stretchr/testify/require"
)

// lookUp finds the user for a repository, and what the user of the keychain is told.
func lookUp(t testing.TB, file, repository string) (string, string) {
	t.Helper()
	repo, err := name.NewRepository(repository)
	require.NoError(t, err)
	var told []string
	k := &Keychain{File: file, Warn: func(text string) { told = append(told, text) }}
	var found authn.AuthConfig
	for range 2 { // each is told once
		found, err = k.lookup(t.Context(), repo)
		require.NoError(t, err)
	}
	return found.Username + found.IdentityToken, strings.Join(told, "\n")
}

// entries is a file with those keys, each with the key's number as the user.
func entries(keys ...string) string {
	var all []string
	for i, k := range keys {
		user := fmt.Sprintf("%d:pa55word", i)
		all = append(all, fmt.Sprintf(`%q: {"auth": %q}`, k,
			base64.StdEncoding.EncodeToString([]byte(user))))
	}
	return "{" + strings.Join(all, ", ") + "}"
}

func writeText(t testing.TB, file, text string) string {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

// TestCredentialKeys: a key is found in each form that docker, podman, skopeo or the kubelet find.
// The one that names most of the repository counts, and one of another repository never does.
func TestCredentialKeys(t *testing.T) {
	const r, hub = "r.example.com/team/vm/disk", "docker.io/team/disk"
	for _, c := range []struct {
		repository string
		keys       []string
		want       string // the user
	}{
		{r, []string{"r.example.com"}, "0"},
		{r, []string{"r.example.com/"}, "0"},
		{r, []string{"https://r.example.com"}, "0"},
		{r, []string{"http://r.example.com/"}, "0"},
		{r, []string{"https://r.example.com/v1"}, "0"},
		{r, []string{"https://r.example.com/v1/"}, "0"},
		{r, []string{"http://r.example.com/v2/"}, "0"},
		{r, []string{"r.example.com/v2/"}, "0"},
		{r, []string{"https://r.example.com/v2/team/"}, "0"},
		{r, []string{"https://r.example.com/api/docker/"}, "0"}, // as docker and podman find it
		{r, []string{"r.example.com/team/vm/disk"}, "0"},
		{r, []string{"r.example.com/team/"}, "0"},
		{r, []string{"https://r.example.com/team"}, "0"},
		{r, []string{"*.example.com"}, "0"},
		{r, []string{"https://?.example.com/team"}, "0"},
		{"r.example.com:5000/a", []string{"https://r.example.com:5000/v2/"}, "0"},
		{"r.example.com:5000/a", []string{"*.example.com:5000"}, "0"},
		{"[::1]:5000/a", []string{"http://[::1]:5000/"}, "0"},
		{hub, []string{"https://index.docker.io/v1/"}, "0"},
		{hub, []string{"docker.io"}, "0"},
		{hub, []string{"index.docker.io"}, "0"},
		{hub, []string{"https://registry-1.docker.io/v2/"}, "0"},
		{hub, []string{"docker.io/team"}, "0"},
		{"index.docker.io/team/disk", []string{"docker.io/team/disk"}, "0"},
		{"registry-1.docker.io/team/disk", []string{"docker.io"}, "0"},
		{"busybox", []string{"docker.io/library/busybox"}, "0"},

		{r, []string{"r.example.com", "r.example.com/team/vm", "r.example.com/team",
			"https://r.example.com/v1/", "*.example.com/team/vm/disk"}, "1"},
		{r, []string{"https://r.example.com/api/docker/", "*.example.com"}, "1"},
		{r, []string{"https://r.example.com/v1/", "r.example.com"}, "1"},
		{hub, []string{"https://index.docker.io/v1/", "docker.io/team"}, "1"},

		{r, []string{"r.example.com/tea", "r.example.com/team/v", "example.com", "*.com",
			"r.example.com:443x", "r.example.com.evil.com", "https://evil.com/r.example.com",
			"evil.com/r.example.com", "*.example.com:5000", "r.example.com/other", "", "/", "*",
			"https://?.example.com/other"}, ""},
		{"r.example.com:5000/a", []string{"r.example.com", "*.example.com", "*.example.*",
			"r.example.com:500"}, ""},
		{hub, []string{"quay.io", "docker.com", "hub.docker.com"}, ""},
	} {
		dir := t.TempDir()
		for _, file := range []string{
			writeText(t, filepath.Join(dir, "config.json"), `{"auths":`+entries(c.keys...)+`}`),
			writeText(t, filepath.Join(dir, ".dockercfg"), entries(c.keys...)),
		} {
			got, told := lookUp(t, file, c.repository)
			require.Equal(t, c.want, got, "%s: %v", c.repository, c.keys)
			require.Empty(t, told)
		}
	}
}

// TestCredentialEntries: an entry that is empty or broken does not hide another one.
func TestCredentialEntries(t *testing.T) {
	for name, c := range map[string]struct{ text, want, told string }{
		"empty":      {`{"r.io/a": {}, "https://r.io": {"auth": "bWU6cHc="}}`, "me", ""},
		"no padding": {`{"r.io": {"auth": "bWU6cGE1NQ"}}`, "me", ""},
		"clear":      {`{"r.io": {"username": "me", "password": "x"}}`, "me", ""},
		"token":      {`{"r.io": {"identitytoken": "me"}}`, "me", ""},
		"broken": {`{"r.io/a": {"auth": "pa55word!"}, "r.io": {"auth": "bWU6cHc="}}`, "me",
			`for "r.io/a" has no credential that can be read`},
		"another is broken": {`{"q.io": {"auth": "pa55word!"}, "r.io": {"auth": "bWU6cHc="}}`,
			"me", ""},
	} {
		file := writeText(t, filepath.Join(t.TempDir(), "x"), `{"auths":`+c.text+`}`)
		got, told := lookUp(t, file, "r.io/a")
		require.Equal(t, c.want, got, name)
		require.Contains(t, told, c.told, name)
		require.NotContains(t, told, "pa55word")
		require.Equal(t, c.told == "", told == "", "%s: %s", name, told)
	}
	got, _ := lookUp(t, writeText(t, filepath.Join(t.TempDir(), "x"), ""), "r.io/a")
	require.Empty(t, got)
	dir := filepath.Dir(writeText(t, filepath.Join(t.TempDir(), "auth.json"),
		`{"auths":`+entries("r.io")+`}`))
	got, _ = lookUp(t, dir, "r.io/a")
	require.Equal(t, "0", got, "podman's file in a directory")
}

// noPlaces makes nothing of this machine a place of credentials, except for what lies in fixed
// directories.
func noPlaces(t *testing.T) (home string) {
	home = t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv("XDG_RUNTIME_DIR", filepath.Join(home, "run"))
	for _, name := range []string{"DOCKER_AUTH_CONFIG", "REGISTRY_AUTH_FILE", "DOCKER_CONFIG",
		"XDG_CONFIG_HOME"} {
		t.Setenv(name, "")
	}
	return home
}

// TestCredentialPlaces: each place is looked at, and one does not hide another.
func TestCredentialPlaces(t *testing.T) {
	home := noPlaces(t)
	t.Setenv("DOCKER_AUTH_CONFIG", `{"auths":`+entries("env.io", "all.io")+`}`)
	file := func(host string, path ...string) {
		t.Helper()
		text := entries(host, "all.io", "x.io")
		if path[len(path)-1] != legacyConfig {
			text = `{"auths":` + text + `}`
		}
		writeText(t, filepath.Join(append([]string{home}, path...)...), text)
	}
	file("session.io", "run", "containers", "auth.json")
	file("config.io", ".config", "containers", "auth.json")
	file("docker.example", ".docker", "config.json")
	file("legacy.io", legacyConfig)
	for _, host := range []string{"env.io", "session.io", "config.io", "docker.example",
		"legacy.io"} {
		got, told := lookUp(t, "", host+"/a")
		require.Equal(t, "0", got, host)
		require.Empty(t, told)
	}
	got, _ := lookUp(t, "", "all.io/a")
	require.Equal(t, "1", got)
	got, _ = lookUp(t, "", "other.io/a")
	require.Empty(t, got)

	file("named.io", "named")
	file("dir.io", "dir", "config.json")
	t.Setenv("REGISTRY_AUTH_FILE", filepath.Join(home, "named"))
	t.Setenv("DOCKER_CONFIG", filepath.Join(home, "dir"))
	for host, want := range map[string]string{"named.io": "0", "dir.io": "0", "config.io": "0",
		"legacy.io": "0", "session.io": "", "docker.example": ""} {
		got, told := lookUp(t, "", host+"/a")
		require.Equal(t, want, got, host)
		require.Empty(t, told)
	}

	// What cannot be read hides nothing, either.
	t.Setenv("REGISTRY_AUTH_FILE", filepath.Join(home, "nothing"))
	writeText(t, filepath.Join(home, "dir", "config.json"), `{"auths": {"x.io": "pa55word`)
	got, told := lookUp(t, "", "config.io/a")
	require.Equal(t, "0", got)
	require.Contains(t, told, "nothing: no such file")
	require.Contains(t, told, "is not what docker writes into its config.json")
	require.NotContains(t, told, "pa55word")
	require.Equal(t, 2, strings.Count(told, "going on without it"), told)
}

// TestCredentialPlacesInOrder: the order is the documented one.
func TestCredentialPlacesInOrder(t *testing.T) {
	names := func(uid int, env map[string]string) (all []string) {
		for _, p := range placesOf(func(name string) string { return env[name] }, "/home/a", uid) {
			all = append(all, p.name)
		}
		return all
	}
	require.Equal(t, []string{"/run/user/7/containers/auth.json", "/run/containers/7/auth.json",
		"/home/a/.config/containers/auth.json", "/home/a/.docker/config.json",
		"/home/a/.dockercfg"}, names(7, nil))
	require.Equal(t, []string{"DOCKER_AUTH_CONFIG", "/f", "/d/config.json",
		"/c/containers/auth.json", "/home/a/.dockercfg"}, names(7, map[string]string{
		"DOCKER_AUTH_CONFIG": "{}", "REGISTRY_AUTH_FILE": "/f", "DOCKER_CONFIG": "/d",
		"XDG_RUNTIME_DIR": "/r", "XDG_CONFIG_HOME": "/c"}))
	require.Equal(t, []string{"/r/containers/auth.json", "/run/containers/0/auth.json",
		"/home/a/.config/containers/auth.json", "/home/a/.docker/config.json",
		"/home/a/.dockercfg", "/var/lib/kubelet/config.json", "/var/lib/kubelet/.dockercfg",
		"/.docker/config.json", "/.dockercfg"},
		names(0, map[string]string{"XDG_RUNTIME_DIR": "/r"}))
}

// TestCredentialHelpers asks programs that keep credentials. One that is missing or fails is told,
// and what needs no credential, or has one elsewhere, is fetched all the same.
func TestCredentialHelpers(t *testing.T) {
	home := noPlaces(t)
	bin := filepath.Join(home, "bin")
	program := func(name, script string) {
		writeText(t, filepath.Join(bin, "docker-credential-"+name), "#!/bin/sh\n"+script)
		require.NoError(t, os.Chmod(filepath.Join(bin, "docker-credential-"+name), 0o700))
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	program("good", `read key; echo "$key" >> `+home+`/asked
case "$key" in
r.io|docker.io) echo '{"ServerURL":"x","Username":"me","Secret":"pa55word"}';;
t.io) echo '{"Username":"<token>","Secret":"token"}';;
https://odd.io/v1/) echo '{"Username":"odd","Secret":"pa55word"}';;
*) echo "credentials not found in native keychain"; exit 1;;
esac`)
	program("bad", `echo pa55word; echo pa55word >&2; exit 3`)
	program("odd", `echo "pa55word"`)
	for name, c := range map[string]struct{ text, repository, want, told string }{
		"store":     {`"credsStore":"good"`, "r.io/a", "me", ""},
		"not there": {`"credsStore":"good"`, "q.io/a", "", ""},
		"token":     {`"credsStore":"good"`, "t.io/a", "token", ""},
		"Hub":       {`"credsStore":"good"`, "busybox", "me", ""},
		"for one":   {`"credsStore":"none","credHelpers":{"r.io":"good"}`, "r.io/a", "me", ""},
		"by address": {`"credHelpers":{"https://odd.io/v1/":"good"}`, "odd.io/a", "odd",
			""},
		"part": {`"credsStore":"good","auths":{"r.io/a":{"auth":"eDp5"}}`, "r.io/a", "x", ""},
		"beside": {`"credsStore":"good","auths":{"q.io":{"auth":"eDp5"},"r.io":{}}`, "q.io/a", "x",
			""},
		"missing": {`"credsStore":"none"`, "r.io/a", "", "docker-credential-none"},
		"missing, beside": {`"credHelpers":{"r.io":"none"},"auths":{"r.io":{"auth":"eDp5"}}`,
			"r.io/a", "x", "not found"},
		"fails":  {`"credsStore":"bad"`, "r.io/a", "", "exit status 3"},
		"no one": {`"credsStore":"odd"`, "r.io/a", "", "its answer is no credential"},
	} {
		file := writeText(t, filepath.Join(home, ".docker", "config.json"), "{"+c.text+"}")
		for _, named := range []string{file, ""} {
			got, told := lookUp(t, named, c.repository)
			require.Equal(t, c.want, got, name)
			require.Contains(t, told, c.told, name)
			require.Equal(t, c.told == "", told == "", "%s: %s", name, told)
			require.NotContains(t, told, "pa55word")
			require.LessOrEqual(t, strings.Count(told, "\n"), 0, "it is told once")
		}
	}

}

// FuzzCredentials reads anything as a file of credentials.
func FuzzCredentials(f *testing.F) {
	f.Add([]byte(`{"auths":{"*.example.com/a":{"auth":"bWU6cHc="}}}`))
	repo, _ := name.NewRepository("r.example.com/a/b")
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, content []byte) {
		if bytes.Contains(content, []byte("cred")) {
			return // it would start programs of these names
		}
		file := filepath.Join(dir, "config.json")
		require.NoError(t, os.WriteFile(file, content, 0o600))
		if c, err := readConfig(file); err == nil {
			_ = c.credential(t.Context(), repo, func(error) {})
		}
	})
}
