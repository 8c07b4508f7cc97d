package main

import (
	"encoding/json"
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

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/daemon/options"
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
