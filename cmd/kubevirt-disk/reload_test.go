package main

import (
	"encoding/json"
	"errors"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"reflect"
	"slices"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target/targettest"
)

const (
	readAgain    = "the configuration was read again"
	needsRestart = "some changed settings take effect only after a restart"
	unusable     = "the configuration was read again and cannot be used: nothing has changed"
)

// count returns how many log entries have a message.
func (p *process) count(message string) (n int) {
	for _, e := range p.entries() {
		if e["msg"] == message {
			n++
		}
	}
	return n
}

// hangUp sends SIGHUP and returns a field of the log entry that follows.
func (p *process) hangUp(message, field string) any {
	p.t.Helper()
	before := p.count(message)
	require.NoError(p.t, p.cmd.Process.Signal(syscall.SIGHUP))
	p.until(message, func() bool { return p.count(message) > before })
	var last any
	for _, e := range p.entries() {
		if e["msg"] == message {
			last = e[field]
		}
	}
	return last
}

func (p *process) luns() []status.LUN {
	p.t.Helper()
	_, body := p.page("/status")
	var s status.Status
	require.NoError(p.t, json.Unmarshal([]byte(body), &s))
	return s.LUNs
}

// TestSIGHUP changes the configuration of a daemon that two machines use.
func TestSIGHUP(t *testing.T) {
	const first, second = "iqn.2020-01.test:first", "iqn.2020-01.test:second"
	l := newPlace(t, "a.raw", "b.raw", "c.raw")
	file := filepath.Join(l.dir, "config.yaml")
	write := func(text string) { require.NoError(t, os.WriteFile(file, []byte(text), 0o600)) }
	write("log-level: info\ndisks: {c.raw: {read-only: true}}\n")
	p := l.serve(t, settings.EnvConfig+"="+file)
	one, two := p.login(first, 1, 2, 3), p.login(second, 1, 2, 3)
	block := make([]byte, 512)
	one.MustGood(t, targettest.Write10(1, 0, block))
	one.MustGood(t, targettest.Write10(2, 0, block))
	two.MustFail(t, targettest.Write10(1, 0, block), "status 0x18")

	require.Empty(t, p.hangUp(readAgain, "changed"), "nothing has changed")
	for name, text := range map[string]string{
		"not YAML":         "log-level: [",
		"an unknown key":   "disks: {a.raw: {colour: red}}",
		"an unknown image": "disks: {z.raw: {access-mode: write-shared}}",
		"a wrong value":    "log-level: loud\ndisks: {a.raw: {access-mode: write-shared}}",
		"equal serials": "access-mode: write-shared\ndisks: {a.raw: {serial: s}, b.raw: " +
			"{serial: s}}",
		"a LUN that is taken": "disks: {a.raw: {lun: 2, access-mode: write-shared}}",
	} {
		write(text)
		require.NotEmpty(t, p.hangUp(unusable, "error"), name)
		two.MustFail(t, targettest.Write10(1, 0, block), "status 0x18")
	}
	require.NoError(t, os.Remove(file))
	require.Contains(t, p.hangUp(unusable, "error"), "cannot be read")

	write(`
log-level: debug
memory: 32Mi
disks:
  a.raw: {access-mode: write-shared, size: 1Mi}
  b.raw: {read-only: true}
  c.raw: {read-only: false}
`)
	require.Equal(t, []any{keyLogLevel, "a.raw: access-mode", "b.raw: read-only"},
		p.hangUp(readAgain, "changed"))
	p.until("it is said what waits",
		func() bool { return p.logged(needsRestart, "settings") != nil })
	waits, _ := p.logged(needsRestart, "settings").([]any)
	require.Len(t, waits, 3)
	require.Equal(t, []any{"memory", "a.raw: size"}, waits[:2])
	require.Contains(t, waits[2], "c.raw: read-only (LUN 3 can be written after a restart only")
	two.MustGood(t, targettest.Write10(1, 0, block))
	one.MustGood(t, targettest.Write10(1, 0, block))
	one.MustFail(t, targettest.Write10(2, 0, block), "06/2A/01")
	one.MustFail(t, targettest.Write10(2, 0, block), "07/27/00")
	one.MustFail(t, targettest.Write10(3, 0, block), "07/27/00")
	luns := p.luns()
	require.Equal(t, "write-shared", luns[0].AccessMode)
	require.Equal(t, []bool{false, true}, []bool{luns[0].ReadOnly, luns[1].ReadOnly})

	// And back: a LUN open to everybody does not become exclusive while it is in use.
	write("log-level: info\n")
	require.Equal(t, []any{keyLogLevel, "b.raw: read-only"}, p.hangUp(readAgain, "changed"))
	p.until("it is said again", func() bool { return p.count(needsRestart) == 2 })
	one.MustFail(t, targettest.Write10(2, 0, block), "06/2A/01")
	one.MustGood(t, targettest.Write10(2, 0, block))
	two.MustGood(t, targettest.Write10(1, 0, block))

	// A setting that can change takes effect even if another one of the same disk cannot.
	write("log-level: info\ndisks: {a.raw: {access-mode: write-exclusive, read-only: true}}\n")
	require.Equal(t, []any{"a.raw: read-only"}, p.hangUp(readAgain, "changed"))
	two.MustFail(t, targettest.Write10(1, 0, block), "06/2A/01")
	two.MustFail(t, targettest.Write10(1, 0, block), "07/27/00")
	luns = p.luns()
	require.Equal(t, "write-shared", luns[0].AccessMode)
	require.True(t, luns[0].ReadOnly)
	require.Equal(t, exitDone, p.terminate())
}

// TestSIGHUPReadsTheCredentialsAtOnce checks that SIGHUP rotates the credentials at once, and that
// the log is silent about unchanged ones.
func TestSIGHUPReadsTheCredentialsAtOnce(t *testing.T) {
	l := newPlace(t, "a.raw")
	file := filepath.Join(l.dir, "password")
	require.NoError(t, os.WriteFile(file, []byte(testSecret), 0o600))
	p := l.serve(t, "CHAP_USERNAME=user", "CHAP_PASSWORD_FILE="+file)
	require.Empty(t, p.hangUp(readAgain, "changed"))
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.Contains(t, p.hangUp(unusable, "error"), "CHAP_PASSWORD_FILE")
	login := targettest.LoginOptions{Target: wrapperTarget,
		CHAP: &targettest.CHAP{Username: "user", Password: testSecret}}
	targettest.MustLogin(t, p.portal(), login)
	require.NoError(t, os.WriteFile(file, []byte(testSecret+"-2"), 0o600))
	p.hangUp(readAgain, "changed")
	require.Error(t, testtool.Err(targettest.Login(p.portal(), login)))
	login.CHAP.Password = testSecret + "-2"
	targettest.MustLogin(t, p.portal(), login)
	require.Equal(t, exitDone, p.terminate())
	require.NotContains(t, p.stderr.String(), testSecret)
}

// TestAClosedTerminalEndsTheDaemon checks that closing the terminal ends the daemon. Any other
// SIGHUP does not, nor does closing a terminal that the daemon was started to outlive.
func TestAClosedTerminalEndsTheDaemon(t *testing.T) {
	// Under nohup, the tests' processes would ignore SIGHUP from the start.
	heard := make(chan os.Signal, 1)
	signal.Notify(heard, syscall.SIGHUP)
	defer signal.Stop(heard)
	for name, command := range map[string]string{
		"": `exec "$0" serve`, "nohup": `trap "" HUP; exec "$0" serve`,
	} {
		t.Run(name, func(t *testing.T) {
			l := newPlace(t, "a.raw")
			person, terminal := newTerminal(t)
			p := &process{t: t, done: make(chan struct{})}
			p.cmd = exec.Command("/bin/sh", "-c", command, binary(t))
			p.cmd.Env, p.cmd.Stdin, p.cmd.Stderr = append(l.env, "LOG_FORMAT=json"), terminal,
				&p.stderr
			p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
			require.NoError(t, p.cmd.Start())
			go func() {
				_ = p.cmd.Wait()
				close(p.done)
			}()
			t.Cleanup(func() { _ = p.cmd.Process.Kill(); <-p.done })
			require.NoError(t, terminal.Close())
			p.untilReady(l)
			p.hangUp(readAgain, "changed")
			before := p.count(readAgain)
			require.NoError(t, person.Close())
			if name == "" {
				require.Equal(t, exitDone, p.status())
				return
			}
			p.until("the configuration is read again",
				func() bool { return p.count(readAgain) > before })
			require.Equal(t, exitDone, p.terminate())
		})
	}
}

// TestChangedKeys fails if a disk gets a new setting and reload does not notice changes of it.
func TestChangedKeys(t *testing.T) {
	values := map[string]string{
		"lun": "7", keyCopyMode: "none", keyAccessMode: "write-shared", keySize: "1Mi",
		"serial": "s", "naa": "3000000000000001", keyReadOnly: "true",
		keyFormat: "raw", keyUsageType: "fast", keyBlockSize: "4096",
	}
	known := slices.Sorted(settings.Keys(newConfig().diskSettings()))
	require.Equal(t, known, slices.Sorted(maps.Keys(values)))
	for key, value := range values {
		var before, changed options.Options
		row, _ := settings.Find((&config{Options: &changed}).diskSettings(), key)
		require.NoError(t, row.To.Set([]string{value}))
		now, keys := table(&changed), []string{}
		for i, s := range table(&before) {
			if !reflect.DeepEqual(s.Field, now[i].Field) {
				keys = append(keys, s.Key)
			}
		}
		require.Equal(t, []string{key}, keys)
	}
}

// TestSettingsAreNamed checks that the daemon's messages name settings as a person types them.
func TestSettingsAreNamed(t *testing.T) {
	o := options.Options{Volumes: new(options.Volumes)}
	names := map[any]options.Setting{}
	for _, s := range slices.Backward(table(&o)) { // of several, the first
		names[s.Field] = s
	}
	for field, key := range map[any]string{
		&o.Images.Dir: keyDiskDir, &o.WorkDir: keyWorkDir, &o.PersistentDir: "persistent-dir",
		&o.Settings.Disk.CopyMode: keyCopyMode, &o.Portals: keyListen, &o.Pages: keyMetricsListen,
		&o.PagesHosts: "pages-host", &o.ReadyFile: keyReadyFile,
		&o.ControlSocket: keyControlSocket, &o.UsageTypes: keyUsageType,
		&o.Leftovers: "leftovers", &o.Streams.CacheDir: "cache-dir",
		&o.RecordBoot: "record-boot", &o.Volumes.Listen: keyVolumesListen,
		&o.Volumes.Dir: "volumes-dir", &o.Volumes.Claims: "volumes-claim",
	} {
		require.Equal(t, key, names[field].Key)
		require.Equal(t, "--"+key, names[field].Flag)
		require.NotEmpty(t, names[field].Variable)
		require.Equal(t, nameOf(key), names[field].String())
	}
	require.Equal(t, `"disks" in the configuration file`, names[&o.Settings.Disks].String())
	require.Contains(t, names[&o.CHAP].String(), "CHAP_PASSWORD")
	require.Equal(t, keyFormat, names[&o.Settings.Disk.Format].Key)
	require.Equal(t, keyUsageType, names[&o.Settings.Disk.UsageType].Key)
}

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
