package main

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/targettest"
)

func credential(user, secret string) chap.Config {
	return chap.Config{Initiator: chap.Credential{Username: user, Secret: chap.NewSecret(secret)}}
}

// TestRotation goes through several contents of the files, and checks which credentials are in
// force after each.
func TestRotation(t *testing.T) {
	old, next := credential("user", testSecret), credential("user", testSecret+"-2")
	mixed := credential("next", testSecret)
	half := errors.New("CHAP_PASSWORD_FILE names a file that is empty")
	var now chap.Config
	var problem error
	core, lines := observer.New(zap.DebugLevel)
	inForce := old
	replace := func(c chap.Config) error { inForce = c; return nil }
	r := newRotation(func() (chap.Config, error) { return now, problem }, replace, old,
		zap.New(core))
	look := func(c chap.Config, err error, want chap.Config, logged ...string) {
		t.Helper()
		now, problem = c, err
		r.look()
		require.True(t, inForce.Equal(want))
		var messages []string
		for _, l := range lines.TakeAll() {
			messages = append(messages, l.Message)
			require.NotContains(t, l.ContextMap(), "password")
		}
		require.Equal(t, logged, messages)
	}
	const changed = "the credentials have changed: new logins need the new ones, and sessions go on"
	const bad = "the credential files cannot be used: the earlier credentials stay in force"
	look(old, nil, old)
	look(chap.Config{}, half, old) // a file that is being written
	look(next, nil, old)
	look(next, nil, next, changed)
	look(mixed, nil, next) // two files that are being written
	look(next, nil, next)
	look(next, nil, next)

	look(chap.Config{}, half, next)
	for i := range 3 { // only one warning, however long it lasts
		want := []string(nil)
		if i == 0 {
			want = []string{bad}
		}
		look(chap.Config{}, half, next, want...)
	}
	another := errors.New("CHAP_PASSWORD_FILE is shorter than 12 bytes")
	look(chap.Config{}, another, next)
	look(chap.Config{}, another, next, bad)
	look(next, nil, next)
	look(next, nil, next, "the credential files can be used again and have not changed")
	look(chap.Config{}, half, next)
	look(chap.Config{}, half, next, bad)
	look(old, nil, next)
	look(old, nil, old, changed)
}

// TestRereader checks that a regular file is read again and a pipe is not.
func TestRereader(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	r := settings.NewRereader()
	require.ErrorIs(t, testtool.Err(r.Read(path)), os.ErrNotExist)
	for _, content := range []string{"one", "two", ""} {
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		require.Equal(t, content, string(testtool.Must(r.Read(path))(t)))
	}
	require.NoError(t, os.Remove(path))
	require.ErrorIs(t, testtool.Err(r.Read(path)), os.ErrNotExist)
	require.NoError(t, os.WriteFile(path, make([]byte, osfile.MaxText+1), 0o600))
	require.ErrorContains(t, testtool.Err(r.Read(path)), "larger than")
}

// TestChangedCredentialFiles rotates a mounted secret of Kubernetes under a session that reads and
// writes, and then breaks the secret.
func TestChangedCredentialFiles(t *testing.T) {
	const mutual = "another-correct-horse-battery"
	l := newPlace(t, "a.raw")
	mount := filepath.Join(l.dir, "secret")
	version := 0
	// Do as the kubelet does: make a new directory, and replace one link.
	publish := func(files map[string]string) {
		t.Helper()
		version++
		data := filepath.Join(mount, "..version-"+string(rune('0'+version)))
		require.NoError(t, os.MkdirAll(data, 0o755))
		for name, content := range files {
			require.NoError(t, os.WriteFile(filepath.Join(data, name), []byte(content), 0o600))
			if _, err := os.Lstat(filepath.Join(mount, name)); err != nil {
				require.NoError(t,
					os.Symlink(filepath.Join("..data", name), filepath.Join(mount, name)))
			}
		}
		require.NoError(t, os.Symlink(filepath.Base(data), filepath.Join(mount, "..data_tmp")))
		require.NoError(t, os.Rename(filepath.Join(mount, "..data_tmp"),
			filepath.Join(mount, "..data")))
	}
	secret := func(user, password, targetUser, targetPassword, initiator string) map[string]string {
		return map[string]string{"user": user, "password": password, "mutual-user": targetUser,
			"mutual-password": targetPassword, "name": initiator}
	}
	const first, second = "iqn.2020-01.test:first", "iqn.2020-01.test:second"
	publish(secret("user", testSecret, "target", mutual, first))
	p := l.serve(t, "LOG_LEVEL=debug",
		"CHAP_USERNAME_FILE="+mount+"/user", "CHAP_PASSWORD_FILE="+mount+"/password",
		"CHAP_MUTUAL_USERNAME_FILE="+mount+"/mutual-user",
		"CHAP_MUTUAL_PASSWORD_FILE="+mount+"/mutual-password",
		"CHAP_INITIATOR_NAME_FILE="+mount+"/name")
	options := func(initiator, user, password, targetUser, targetSecret string,
	) targettest.LoginOptions {
		return targettest.LoginOptions{Initiator: initiator, Target: wrapperTarget,
			ISID: [6]byte{0x80, byte(version)},
			CHAP: &targettest.CHAP{Username: user, Password: password,
				TargetUsername: targetUser, TargetPassword: targetSecret}}
	}
	refused := func(o targettest.LoginOptions) {
		t.Helper()
		_, err := targettest.Login(p.portal(), o)
		var refusal *targettest.LoginError
		require.ErrorAs(t, err, &refusal)
		require.EqualValues(t, 0x0201, refusal.Status)
	}
	before := options(first, "user", testSecret, "target", mutual)
	s := targettest.MustLogin(t, p.portal(), before, 1)
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for n := byte(0); ; n++ {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			data := make([]byte, 512)
			data[0] = n
			if res, err := s.Do(targettest.Write10(1, 0, data)); err != nil || !res.Good() {
				ended <- errors.Join(errors.New("a write has failed"), err)
				return
			}
		}
	}()

	after := options(second, "user-2", testSecret+"-2", "target-2", mutual+"-2")
	refused(after)
	const changed = "the credentials have changed: new logins need the new ones, and sessions go on"
	publish(secret("user-2", testSecret+"-2", "target-2", mutual+"-2", second))
	p.until("the credentials are new", func() bool { return p.logged(changed, "level") != nil })
	refused(before)
	targettest.MustLogin(t, p.portal(), after, 1)
	// The bound name changes too.
	refused(options(first, "user-2", testSecret+"-2", "target-2", mutual+"-2"))

	const bad = "the credential files cannot be used: the earlier credentials stay in force"
	publish(secret("user-3", "short", "target-3", mutual, first))
	p.until("it is said so", func() bool { return p.logged(bad, "problem") != nil })
	require.Contains(t, p.logged(bad, "problem"), "CHAP_PASSWORD_FILE is shorter than 12 bytes")
	after.ISID[1]++
	targettest.MustLogin(t, p.portal(), after, 1)
	close(stop)
	require.NoError(t, <-ended, "the session that was there before goes on")
	require.Equal(t, exitDone, p.terminate())
	for _, hidden := range []string{testSecret, mutual, "short\""} {
		require.NotContains(t, p.stderr.String(), hidden)
	}
}
