package main

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zapcore"

	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target"
)

const testSecret = "correct-horse-battery-staple"

// cleanEnv removes every variable that a configuration is read from.
func cleanEnv(t *testing.T) {
	t.Helper()
	names := []string{settings.EnvConfig, "USERNAME", "PASSWORD", "USERNAME_BASE64",
		"PASSWORD_BASE64", "CHAP_USERNAME", "CHAP_PASSWORD",
		"CHAP_USERNAME_FILE", "CHAP_PASSWORD_FILE", "CHAP_MUTUAL_USERNAME", "CHAP_MUTUAL_PASSWORD",
		"CHAP_INITIATOR_NAME", "CHAP_INITIATOR_NAME_FILE"}
	for _, s := range newConfig().settings() {
		names = append(names, s.Env...)
	}
	for _, name := range names {
		t.Setenv(name, "") // puts the old value back at the end
		require.NoError(t, os.Unsetenv(name))
	}
}

func withCHAP(t *testing.T) {
	t.Helper()
	t.Setenv("CHAP_USERNAME", "user")
	t.Setenv("CHAP_PASSWORD", testSecret)
}

func yamlFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func tryConfig(args ...string) (*config, error) {
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	settings.AddFlags(flags, newConfig().settings())
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	return loadConfig(flags, osfile.ReadText, flags.Args()...)
}

func mustConfig(t *testing.T, args ...string) *config {
	t.Helper()
	return testtool.Must(tryConfig(args...))(t)
}

func portalTexts(c *config) string {
	var all []string
	for _, p := range c.Portals {
		all = append(all, p.String())
	}
	return strings.Join(all, ",")
}

// onLoopback is an environment in which volumes can be made.
const onLoopback = "VOLUMES_LISTEN=127.0.0.1:8443"

// aContainer is an environment in which a container image has settings.
const aContainer = "CONTAINER_IMAGE=r.example/web:1"

// settingCases has, for each setting, three values to tell its sources apart.
var settingCases = []struct {
	key                   string
	inFile, inEnv, asFlag string
	// environment without which the values are refused: "NAME=value", separated by spaces
	also   string
	needed bool   // with that environment, no value is refused
	fails  string // the value that is refused; "": none
}{
	{key: keyDiskDir, inFile: "/f", inEnv: "/e", asFlag: "/a"},
	{key: keyWorkDir, inFile: "/f", inEnv: "/e", asFlag: "/a"},
	{key: keyListen, inFile: "127.0.0.2:1", inEnv: "127.0.0.3:2", asFlag: "[::1]:3"},
	{key: keyPort, inFile: "4001", inEnv: "4002", asFlag: "4003"},
	{key: keyTargetName, inFile: "iqn.2020-01.f", inEnv: "iqn.2020-01.e", asFlag: "iqn.2020-01.a"},
	{key: keyCopyMode, inFile: "none", inEnv: "copy-on-write", asFlag: "copy-on-read"},
	{key: keyAccessMode, inFile: "write-shared", inEnv: "read-shared", asFlag: "write-exclusive"},
	{key: keyMetricsListen, inFile: "127.0.0.1:1", inEnv: "127.0.0.1:2", asFlag: "127.0.0.1:3"},
	{key: "pages-host", inFile: "f.example", inEnv: "e.example", asFlag: "a.example"},
	{key: keyReadyFile, inFile: "/f", inEnv: "/e", asFlag: "/a"},
	{key: keyLogLevel, inFile: "debug", inEnv: "warn", asFlag: "error"},
	{key: keyLogFormat, inFile: "json", inEnv: "console", asFlag: "json"},
	{key: "persistent-dir", inFile: "/f", inEnv: "/e", asFlag: "/a"},
	{key: keyUsageType, inFile: "x=/f", inEnv: "x=/e", asFlag: "x=/a"},
	{key: keyPodAnnotations, inFile: "testdata/annotations-file",
		inEnv:  "testdata/annotations-environment",
		asFlag: "testdata/annotations-flag"},
	{key: "on-image-change", inFile: "keep", inEnv: "fail", asFlag: "keep"},
	{key: "leftovers", inFile: "keep", inEnv: "remove", asFlag: "keep"},
	{key: keySize, inFile: "1Ki", inEnv: "2Mi", asFlag: "3Gi"},
	{key: keyBlockSize, inFile: "512", inEnv: "4096", asFlag: "512"},
	{key: "ephemeral-flush", inFile: "true", inEnv: "false", asFlag: "true"},
	{key: keyControlSocket, inFile: "/f", inEnv: "/e", asFlag: "/a"},
	{key: "record-boot", inFile: "/f", inEnv: "/e", asFlag: "/a"},
	{key: "memory", inFile: "4194304", inEnv: "5000000", asFlag: "6000001"},
	{key: "max-sessions", inFile: "1", inEnv: "2", asFlag: "3"},
	{key: "max-sessions-per-address", inFile: "1", inEnv: "2", asFlag: "3"},
	{key: "image", inFile: "r.example/f:1", inEnv: "r.example/e:1", asFlag: "r.example/a:1"},
	{key: keyContainerImage, inFile: "r.example/f:1", inEnv: "r.example/e:1",
		asFlag: "r.example/a:1"},
	{key: keyEntrypoint, inFile: "f", inEnv: "e", asFlag: "a", also: aContainer},
	{key: keyArgs, inFile: "f", inEnv: "e", asFlag: "a, b", also: aContainer},
	{key: keyEnv, inFile: "A=f", inEnv: "A=e", asFlag: "A=a, b", also: aContainer},
	{key: keyEnvFile, inFile: "testdata/env-f", inEnv: "testdata/env-e",
		asFlag: "testdata/env-a", also: aContainer},
	{key: "user", inFile: "f", inEnv: "e", asFlag: "a", also: aContainer},
	{key: keyContDir, inFile: "/f", inEnv: "/e", asFlag: "/a", also: aContainer},
	{key: "stop-signal", inFile: "TERM", inEnv: "INT", asFlag: "QUIT", also: aContainer},
	{key: "hostname", inFile: "f", inEnv: "e", asFlag: "a", also: aContainer},
	{key: "tty", inFile: "true", inEnv: "false", asFlag: "true", also: aContainer},
	{key: "grace", inFile: "1", inEnv: "2", asFlag: "3", also: aContainer},
	{key: "cache-dir", inFile: "/f", inEnv: "/e", asFlag: "/a"},
	{key: "cache-size", inFile: "300000000", inEnv: "400000000", asFlag: "500000000"},
	{key: "unpack-memory", inFile: "33554432", inEnv: "67108864", asFlag: "100663296"},
	{key: "verify", inFile: verifyWhenComplete, inEnv: verifyAlways, asFlag: verifyWhenComplete,
		also: aContainer},
	{key: keyRegistryConfig, inFile: "/f", inEnv: "/e", asFlag: "/a"},
	{key: "registry-ca", inFile: "/f", inEnv: "/e", asFlag: "/a"},
	{key: "registry-mirror", inFile: "a=f", inEnv: "a=e", asFlag: "a=a"},
	{key: "insecure-registry", inFile: "f:1", inEnv: "e:1", asFlag: "a:1"},
	{key: keyVerifyKey, inFile: "testdata/signatures/file.pub",
		inEnv:  "testdata/signatures/environment.pub",
		asFlag: "testdata/signatures/flag.pub", also: aContainer},
	{key: keySignaturePolicy, inFile: "testdata/signatures/file.yaml",
		inEnv:  "testdata/signatures/environment.yaml",
		asFlag: "testdata/signatures/flag.yaml", also: aContainer},
	{key: keyChecksums, inFile: "f", inEnv: "e", asFlag: "a",
		also: "IMAGE=https://h.example/a.img"},
	{key: keyVolumesListen, inFile: "127.0.0.1:1", inEnv: "127.0.0.1:2", asFlag: "127.0.0.1:3"},
	{key: "volumes-dir", inFile: "/f", inEnv: "/e", asFlag: "/a", also: onLoopback},
	{key: keyVolumesTLSCert, inFile: "/f", inEnv: "/e",
		asFlag: "/a", also: onLoopback + " VOLUMES_TLS_KEY=/k", needed: true},
	{key: keyVolumesTLSKey, inFile: "/f", inEnv: "/e",
		asFlag: "/a", also: onLoopback + " VOLUMES_TLS_CERT=/c", needed: true},
	{key: keyVolumesClientCA, inFile: "/f", inEnv: "/e",
		asFlag: "/a", also: onLoopback + " VOLUMES_TLS_CERT=/c VOLUMES_TLS_KEY=/k"},
	{key: keyVolumesToken, inFile: "/f", inEnv: "/e", asFlag: "/a", also: onLoopback},
	{key: "volumes-portal", inFile: "f:1", inEnv: "e:2", asFlag: "[::1]:3", also: onLoopback},
	{key: "volumes-max", inFile: "1", inEnv: "2", asFlag: "3", also: onLoopback},
	{key: "volumes-max-bytes", inFile: "1024", inEnv: "2048", asFlag: "4096", also: onLoopback},
	{key: "volumes-claim", inFile: "f=/1", inEnv: "e=/2", asFlag: "c=/3", also: onLoopback},
	{key: "volumes-url", inFile: "https://f/1", inEnv: "http://e:2",
		asFlag: "https://a", also: onLoopback},
	{key: keyISCSI, inFile: "false", inEnv: "true", asFlag: "false", also: "NBD_LISTEN=unix:/n"},
	{key: keyNBD, inFile: "unix:/f", inEnv: "127.0.0.1:1", asFlag: "[::1]:2"},
	{key: keyDisk, inFile: "nbds://f/x", inEnv: "nbds://e/x", asFlag: "nbds://a/x"},
	{key: keyDiskTLSCert, inFile: "/f", inEnv: "/e",
		asFlag: "/a", also: "DISK=nbds://h/x DISK_TLS_KEY=/k", needed: true},
	{key: keyDiskTLSKey, inFile: "/f", inEnv: "/e",
		asFlag: "/a", also: "DISK=nbds://h/x DISK_TLS_CERT=/c", needed: true},
	{key: keyDiskServerCA, inFile: "/f", inEnv: "/e", asFlag: "/a", also: "DISK=nbds://h/x"},
	{key: keyNBDTLSCert, inFile: "/f", inEnv: "/e",
		asFlag: "/a", also: "NBD_LISTEN=::1 NBD_TLS_KEY=/k NBD_CLIENT_CA=/c", needed: true},
	{key: keyNBDTLSKey, inFile: "/f", inEnv: "/e",
		asFlag: "/a", also: "NBD_LISTEN=::1 NBD_TLS_CERT=/k NBD_CLIENT_CA=/c", needed: true},
	{key: keyVhostUser, inFile: "/f", inEnv: "/e", asFlag: "/g"},
	{key: keyNBDClientCA, inFile: "/f", inEnv: "/e",
		asFlag: "/a", also: "NBD_LISTEN=::1 NBD_TLS_KEY=/k NBD_TLS_CERT=/c", needed: true},
	{key: "behind-nat", inFile: "true", inEnv: "false", asFlag: "true"},
	{key: "insecure-no-auth", inFile: "true", inEnv: "false",
		asFlag: "true", also: "LISTEN=0.0.0.0", fails: "false"},
	{key: keyKubevirtHook, inFile: "true", inEnv: "false", asFlag: "true", fails: "true"},
}

// field returns the value of the field in which a setting lands, and the setting's text.
func field(c *config, key string) (value any, text string) {
	row, _ := settings.Find(c.rows(), key)
	if row.To.At != nil {
		value = reflect.ValueOf(row.To.At).Elem().Interface()
	}
	if key == keyEnv || key == keyEnvFile {
		value = strings.Join(c.Containers.Machine.Env, ",")
	}
	return value, c.values[key]
}

// TestEverySourceOfEverySetting sets each setting in each combination of its sources: a flag wins
// over the environment, the environment over the file, and the file over the default. Another value
// is another value of its field.
func TestEverySourceOfEverySetting(t *testing.T) {
	covered := map[string]bool{}
	for _, c := range settingCases {
		covered[c.key] = true
		row, _ := settings.Find(newConfig().settings(), c.key)
		fields := map[string]any{} // by text
		for i := range 8 * len(row.Env) {
			env, sources := row.Env[i/8], i%8
			t.Run(fmt.Sprintf("%s/%s/%03b", c.key, env, sources), func(t *testing.T) {
				cleanEnv(t)
				for also := range strings.FieldsSeq(c.also) {
					name, value, _ := strings.Cut(also, "=")
					t.Setenv(name, value)
				}
				var args []string
				want := row.Default
				if sources&1 != 0 {
					args = append(args, "--config="+yamlFile(t, c.key+": \""+c.inFile+"\"\n"))
					want = c.inFile
				}
				if sources&2 != 0 {
					t.Setenv(env, c.inEnv)
					want = c.inEnv
				}
				if sources&4 != 0 {
					args = append(args, "--"+c.key+"="+c.asFlag)
					want = c.asFlag
				}
				got, err := tryConfig(args...)
				if c.fails != "" {
					require.Equal(t, want == c.fails, err != nil, "%v", err)
					return
				}
				if c.needed && sources == 0 {
					require.Error(t, err)
					return
				}
				require.NoError(t, err)
				value, text := field(got, c.key)
				if c.key == keyUsageType {
					text = strings.NewReplacer("map[", "", "]", "", ":", "=").Replace(text)
				}
				require.Equal(t, want, text)
				for other, is := range fields {
					if other != text && value != nil {
						require.NotEqual(t, is, value, "%q is the same as %q", text, other)
					}
				}
				fields[text] = value
			})
		}
	}
	for _, s := range newConfig().settings() {
		require.True(t, covered[s.Key], "no case for %s", s.Key)
	}
}

func TestDefaults(t *testing.T) {
	cleanEnv(t)
	c := mustConfig(t)
	require.Equal(t, "127.0.0.1:3260", portalTexts(c), "without CHAP only this machine is served")
	require.Equal(t, instance.CopyClone, c.Settings.Disk.CopyMode)
	require.Equal(t, serving.AccessWriteExclusive, c.Settings.Disk.AccessMode)
	require.Equal(t, console.LogConfig{Level: zapcore.InfoLevel}, c.log)
	require.False(t, c.CHAP.Enabled())

	withCHAP(t)
	c = mustConfig(t)
	require.Equal(t, "0.0.0.0:3260", portalTexts(c))
	require.True(t, c.CHAP.Enabled())
	t.Setenv("PORT", "3261")
	require.Equal(t, "0.0.0.0:3261", portalTexts(mustConfig(t)))
}

func TestConfigFileByEnvironment(t *testing.T) {
	cleanEnv(t)
	t.Setenv(settings.EnvConfig, yamlFile(t, "disk-dir: /by-env\n"))
	require.Equal(t, "/by-env", mustConfig(t).Images.Dir)
	require.Equal(t, "/by-flag",
		mustConfig(t, "--config", yamlFile(t, "disk-dir: /by-flag\n")).Images.Dir)
}

func TestConfigFileSpellings(t *testing.T) {
	cleanEnv(t)
	for name, c := range map[string]struct{ text, want string }{
		"a number":            {"port: 4000", "127.0.0.1:4000"},
		"not an octal number": {"port: 03260", "127.0.0.1:3260"},
		"a list": {"listen:\n  - 127.0.0.1:1\n  - '[::1]:2'\n",
			"127.0.0.1:1,[::1]:2"},
		"a text with commas":      {"listen: 127.0.0.1:1, ::1\nport: 1", "127.0.0.1:1,[::1]:1"},
		"a list of one":           {"listen: ['127.0.0.1']\nport: 7", "127.0.0.1:7"},
		"nothing":                 {"", "127.0.0.1:3260"},
		"comments":                {"# port: 1\n", "127.0.0.1:3260"},
		"an unquoted bool":        {"insecure-no-auth: true\nlisten: 0.0.0.0", "0.0.0.0:3260"},
		"a start of the document": {"---\nport: 5\n", "127.0.0.1:5"},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.want, portalTexts(mustConfig(t, "--config", yamlFile(t, c.text))))
		})
	}
}

func TestTheExampleFileIsAccepted(t *testing.T) {
	cleanEnv(t)
	withCHAP(t)
	path := filepath.Join("..", "..", "examples", "config.yaml")
	c := mustConfig(t, "--config", path)
	require.Equal(t, "0.0.0.0:3260,[::]:3260", portalTexts(c))
	text := testtool.Must(os.ReadFile(path))(t)
	for _, s := range newConfig().settings() {
		require.Contains(t, string(text), s.Key+":", "the example shows every setting")
	}
}

func TestEmptyTurnsOffOrCountsAsNotSet(t *testing.T) {
	cleanEnv(t)
	for _, s := range newConfig().settings() {
		for _, name := range s.Env {
			t.Setenv(name, "")
		}
	}
	c := mustConfig(t)
	require.Nil(t, c.Pages, "an empty METRICS_LISTEN turns the pages off")
	require.Empty(t, c.ReadyFile, "an empty READY_FILE turns the ready file off")
	require.Equal(t, "/disk", c.Images.Dir, "other empty variables are as good as none")
	require.Equal(t, target.DefaultTargetName, c.TargetName)

	c = mustConfig(t, "--config", yamlFile(t, "metrics-listen: \"\"\nready-file: \"\"\n"))
	require.Nil(t, c.Pages)
	require.Empty(t, c.ReadyFile)
	c = mustConfig(t, "--metrics-listen=", "--ready-file=")
	require.Nil(t, c.Pages)
	require.Empty(t, c.ReadyFile)
}

func TestTheNamesOfTheTargetNameMayAgree(t *testing.T) {
	cleanEnv(t)
	t.Setenv("TARGET_NAME", "iqn.2020-01.same")
	t.Setenv("WWN", "iqn.2020-01.same")
	require.Equal(t, "iqn.2020-01.same", mustConfig(t).TargetName)
	t.Setenv("WWN", "iqn.2020-01.different")
	require.Equal(t, "iqn.2020-01.flag", mustConfig(t, "--target-name=iqn.2020-01.flag").TargetName,
		"a flag decides")
	t.Setenv("TARGET_NAME", "")
	require.Equal(t, "iqn.2020-01.different", mustConfig(t).TargetName)
}

// TestPagesBesideALocalTarget: without an address of their own, the pages are on loopback if the
// disks can be reached without CHAP on loopback only.
func TestPagesBesideALocalTarget(t *testing.T) {
	for _, c := range []struct {
		args []string
		chap bool
		want string
	}{
		{want: "127.0.0.1:9260"},
		{args: []string{"--port=3261"}, want: "127.0.0.1:9260"},
		{args: []string{"--listen=[::1],127.0.0.2"}, want: "127.0.0.1:9260"},
		{args: []string{"--metrics-listen=:9260"}, want: ":9260"},
		{args: []string{"--metrics-listen=0.0.0.0"}, want: "0.0.0.0:9260"},
		{args: []string{"--listen=0.0.0.0", "--insecure-no-auth"}, want: ":9260"},
		{args: []string{"--listen=127.0.0.1,10.0.0.1", "--insecure-no-auth"}, want: ":9260"},
		{chap: true, want: ":9260"},
		{chap: true, args: []string{"--listen=127.0.0.1"}, want: ":9260"},
	} {
		cleanEnv(t)
		if c.chap {
			withCHAP(t)
		}
		require.Equal(t, c.want, mustConfig(t, c.args...).Pages.String(), c.args)
	}
	cleanEnv(t)
	require.Nil(t, mustConfig(t, "--metrics-listen=").Pages)
}

// TestSettingsThatMeanNothing: what means nothing beside the other settings is said, and a flag by
// which a disk could be taken for verified is refused.
func TestSettingsThatMeanNothing(t *testing.T) {
	cleanEnv(t)
	withCHAP(t)
	require.Empty(t, mustConfig(t).idle)
	sources := func(c *config) (all []string) {
		for _, text := range c.idle {
			source, _, _ := strings.Cut(text, ":")
			all = append(all, source)
		}
		return all
	}
	require.Equal(t, []string{"--insecure-no-auth"}, sources(mustConfig(t, "--insecure-no-auth")))
	t.Setenv("VERIFY", "when-complete")
	t.Setenv("CACHE_DIR", "/cache")
	alone := mustConfig(t, "--iscsi=false", "--nbd=unix:/nbd", "--behind-nat", "--metrics-listen=",
		"--pages-host=a", "--on-image-change=keep", "--record-boot=/boot", "--nbd-tls-cert=a",
		"--nbd-tls-key=b", "--nbd-client-ca=c", "--target-name=iqn.2017-01.io.x:y")
	require.Equal(t, []string{"VERIFY", "CACHE_DIR", "--target-name", "--behind-nat",
		"CHAP_USERNAME and CHAP_PASSWORD", "--pages-host", "--on-image-change", "--nbd-tls-cert",
		"--nbd-tls-key", "--nbd-client-ca"}, sources(alone))
	require.False(t, alone.CHAP.Enabled(), "/status would say that the disks are protected")
	require.Empty(t, alone.NBDTLS, "a file that is not there would end the start")
	require.Empty(t, mustConfig(t, "--image=example.com/a:1").idle)
	require.Empty(t, mustConfig(t, "--volumes-listen=127.0.0.1:1").idle)
	require.Equal(t, []string{"--volumes-portal", "CHAP_USERNAME and CHAP_PASSWORD"},
		sources(mustConfig(t, "--volumes-portal=a:1", "--volumes-listen=127.0.0.1:1",
			"--iscsi=false", "--nbd=unix:/nbd")))
	t.Setenv("CHECKSUMS", "SHA256SUMS")
	require.Equal(t, []string{"CHECKSUMS"}, sources(mustConfig(t, "--image=example.com/a:1")))
	require.Empty(t, mustConfig(t, "--image=https://example.com/a.img").idle)
	require.ErrorContains(t, testtool.Err(tryConfig("--image=example.com/a:1", "--checksums=S")),
		"--checksums: is for disks at https:// addresses")
	_, err := tryConfig("--verify=always")
	require.ErrorContains(t, err, "--verify: is for images in registries and at addresses")
}

// TestNamesOfPages: a name for which no browser would ask is told at once.
func TestNamesOfPages(t *testing.T) {
	cleanEnv(t)
	for _, name := range []string{"http://a.example", "a.example:9260", "a.example/", "a b"} {
		_, err := tryConfig("--pages-host=" + name)
		require.ErrorContains(t, err, "is not the name of a host: leave out scheme, port and path")
	}
	mustConfig(t, "--pages-host=Disks_1.example.com,10.0.0.5,[::1],fd00::1")
}

// TestHookWithoutItsDirectory: nothing is made where nobody would ask a hook.
func TestHookWithoutItsDirectory(t *testing.T) {
	cleanEnv(t)
	c, err := tryConfig("--kubevirt-hook")
	require.ErrorContains(t, err, "there is neither a directory "+hooksDir)
	require.Nil(t, c.Hook)
}

// TestPagesThatWereChosen: only the default address of the pages may be given up.
func TestPagesThatWereChosen(t *testing.T) {
	cleanEnv(t)
	require.False(t, mustConfig(t).metricsChosen)
	require.True(t, mustConfig(t, "--metrics-listen=:9260").metricsChosen)
	require.True(t, mustConfig(t, "--config="+yamlFile(t, "metrics-listen: ':9260'")).metricsChosen)
	t.Setenv("METRICS_LISTEN", ":9260")
	require.True(t, mustConfig(t).metricsChosen)
}

func TestParsePortal(t *testing.T) {
	for text, want := range map[string]struct {
		portal   string
		explicit bool
		loopback bool
	}{
		"0.0.0.0:3261":           {"0.0.0.0:3261", true, false},
		"0.0.0.0":                {"0.0.0.0:3260", false, false},
		"127.0.0.1:0":            {"127.0.0.1:0", true, true},
		"127.9.9.9":              {"127.9.9.9:3260", false, true},
		"[::1]:3260":             {"[::1]:3260", true, true},
		"[::1]":                  {"[::1]:3260", false, true},
		"::1":                    {"[::1]:3260", false, true},
		"[fe80::1%eth0]:3260":    {"[fe80::1%eth0]:3260", true, false},
		"[::ffff:127.0.0.1]:1":   {"127.0.0.1:1", true, true},
		"[::ffff:192.0.2.1]:1":   {"192.0.2.1:1", true, false},
		":3260":                  {":3260", true, false},
		"localhost":              {"127.0.0.1:3260", false, true},
		"localhost:1":            {"127.0.0.1:1", true, true},
		"[2001:db8::1]:65535":    {"[2001:db8::1]:65535", true, false},
		"2001:db8::3260":         {"[2001:db8::3260]:3260", false, false},
		"[2001:db8:0:0::1]:3260": {"[2001:db8::1]:3260", true, false},
	} {
		p, explicit := testtool.Must2(parsePortal(text, defaultPort))(t, text)
		require.Equal(t, want.portal, p.String(), text)
		require.Equal(t, want.explicit, explicit, text)
		require.Equal(t, want.loopback, p.Loopback(), text)
	}
	for _, text := range []string{"", "3260", "host", "host:1", "1.2.3.4:", "1.2.3.4:x",
		"1.2.3.4:-1", "1.2.3.4:65536", "[::1", "::1]:1", "[::1]:1:2", "1.2.3:1",
		"http://1.2.3.4:1"} {
		require.Error(t, testtool.Err2(parsePortal(text, defaultPort)), text)
	}
}
