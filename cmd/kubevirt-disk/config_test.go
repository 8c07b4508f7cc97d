package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zapcore"

	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
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
	return loadConfig(flags, settings.ReadBounded, flags.Args()...)
}

func mustConfig(t *testing.T, args ...string) *config {
	t.Helper()
	c, err := tryConfig(args...)
	require.NoError(t, err)
	return c
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

// settingCases has, for each setting, three values to tell its sources apart, the default, and what
// the configuration makes of it.
var settingCases = []struct {
	key                        string
	def, inFile, inEnv, asFlag string
	got                        func(*config) string
	// environment without which the values are refused: "NAME=value", separated by spaces
	also   string
	needed bool   // with that environment, no value is refused
	fails  string // the value that is refused; "": none
}{
	{key: keyDiskDir, def: "/disk", inFile: "/f", inEnv: "/e", asFlag: "/a",
		got: func(c *config) string { return c.Images.Dir }},
	{key: keyWorkDir, def: "/var/lib/kubevirt-disk", inFile: "/f", inEnv: "/e", asFlag: "/a",
		got: func(c *config) string { return c.WorkDir }},
	{key: keyListen, def: "127.0.0.1:3260", inFile: "127.0.0.2:1", inEnv: "127.0.0.3:2",
		asFlag: "[::1]:3", got: portalTexts},
	{key: keyPort, def: "127.0.0.1:3260", inFile: "4001", inEnv: "4002", asFlag: "4003",
		got: func(c *config) string {
			return strings.Replace(portalTexts(c), "127.0.0.1:400", "400",
				1)
		}},
	{key: keyTargetName, def: target.DefaultTargetName, inFile: "iqn.2020-01.f",
		inEnv: "iqn.2020-01.e", asFlag: "iqn.2020-01.a",
		got: func(c *config) string { return c.TargetName }},
	{key: keyCopyMode, def: "clone", inFile: "none", inEnv: "copy-on-write", asFlag: "copy-on-read",
		got: func(c *config) string { return string(c.Settings.Disk.CopyMode) }},
	{key: keyAccessMode, def: "write-exclusive", inFile: "write-shared", inEnv: "read-shared",
		asFlag: "write-exclusive",
		got:    func(c *config) string { return string(c.Settings.Disk.AccessMode) }},
	{key: keyMetricsListen, def: "127.0.0.1:9260", inFile: "127.0.0.1:1", inEnv: "127.0.0.1:2",
		asFlag: "127.0.0.1:3",
		got:    func(c *config) string { return c.Pages.String() }},
	{key: "pages-host", def: "", inFile: "f.example", inEnv: "e.example", asFlag: "a.example",
		got: func(c *config) string { return strings.Join(c.PagesHosts, ",") }},
	{key: keyReadyFile, def: "/tmp/healthy", inFile: "/f", inEnv: "/e", asFlag: "/a",
		got: func(c *config) string { return c.ReadyFile }},
	{key: keyLogLevel, def: "info", inFile: "debug", inEnv: "warn", asFlag: "error",
		got: func(c *config) string { return c.log.Level.String() }},
	{key: keyLogFormat, def: "", inFile: "json", inEnv: "console", asFlag: "json",
		got: func(c *config) string { return c.log.Format }},
	{key: "persistent-dir", def: "", inFile: "/f", inEnv: "/e", asFlag: "/a",
		got: func(c *config) string { return c.PersistentDir }},
	{key: keyUsageType, def: "", inFile: "x=/f", inEnv: "x=/e", asFlag: "x=/a",
		got: func(c *config) string {
			if dir, ok := c.UsageTypes["x"]; ok {
				return "x=" + dir
			}
			return ""
		}},
	{key: keyPodAnnotations, def: "", inFile: "testdata/annotations-file",
		inEnv: "testdata/annotations-environment", asFlag: "testdata/annotations-flag",
		got: func(c *config) string {
			if dir, ok := c.UsageTypes["x"]; ok {
				return "testdata/annotations-" + strings.TrimPrefix(dir, "/")
			}
			return ""
		}},
	{key: "on-image-change", def: "fail", inFile: "keep", inEnv: "fail", asFlag: "keep",
		got: func(c *config) string { return string(c.OnImageChange) }},
	{key: "leftovers", def: "", inFile: "keep", inEnv: "remove", asFlag: "keep",
		got: func(c *config) string { return string(c.Leftovers) }},
	{key: keySize, def: "0", inFile: "1Ki", inEnv: "2Mi", asFlag: "3Gi",
		got: func(c *config) string {
			return map[int64]string{0: "0", 1 << 10: "1Ki", 2 << 20: "2Mi",
				3 << 30: "3Gi"}[c.Settings.Disk.Size]
		}},
	{key: keyBlockSize, def: "0", inFile: "512", inEnv: "4096", asFlag: "512",
		got: func(c *config) string { return fmt.Sprint(c.Settings.Disk.BlockSize) }},
	{key: "ephemeral-flush", def: "false", inFile: "true", inEnv: "false", asFlag: "true",
		got: func(c *config) string { return fmt.Sprint(c.EphemeralFlush) }},
	{key: keyControlSocket, def: "/var/lib/kubevirt-disk/control.sock", inFile: "/f", inEnv: "/e",
		asFlag: "/a", got: func(c *config) string { return c.ControlSocket }},
	{key: "record-boot", inFile: "/f", inEnv: "/e", asFlag: "/a",
		got: func(c *config) string { return c.RecordBoot }},
	{key: "memory", def: "67108864", inFile: "4194304", inEnv: "5000000", asFlag: "6000001",
		got: func(c *config) string { return fmt.Sprint(c.Memory) }},
	{key: "max-sessions", def: "1024", inFile: "1", inEnv: "2", asFlag: "3",
		got: func(c *config) string { return fmt.Sprint(c.Limits.MaxConnections) }},
	{key: "max-sessions-per-address", def: "256", inFile: "1", inEnv: "2", asFlag: "3",
		got: func(c *config) string { return fmt.Sprint(c.Limits.MaxPerAddress) }},
	{key: "image", def: "", inFile: "r.example/f:1", inEnv: "r.example/e:1",
		asFlag: "r.example/a:1", got: func(c *config) string {
			var all []string
			for _, ref := range c.Streams.References {
				all = append(all, ref.String())
			}
			return strings.Join(all, ",")
		}},
	{key: keyContainerImage, def: "", inFile: "r.example/f:1", inEnv: "r.example/e:1",
		asFlag: "r.example/a:1", got: func(c *config) string {
			var all []string
			for _, ref := range c.Containers.References {
				all = append(all, ref.String())
			}
			return strings.Join(all, ",")
		}},
	{key: keyEntrypoint, inFile: "f", inEnv: "e", asFlag: "a", also: aContainer,
		got: func(c *config) string { return strings.Join(c.Containers.Machine.Entrypoint, "|") }},
	{key: keyArgs, inFile: "f", inEnv: "e", asFlag: "a, b", also: aContainer,
		got: func(c *config) string { return strings.Join(c.Containers.Machine.Args, "|") }},
	{key: keyEnv, inFile: "A=f", inEnv: "A=e", asFlag: "A=a, b", also: aContainer,
		got: func(c *config) string { return strings.Join(c.Containers.Machine.Env, "|") }},
	{key: keyEnvFile, inFile: "testdata/env-f", inEnv: "testdata/env-e",
		asFlag: "testdata/env-a", also: aContainer, got: func(c *config) string {
			if env := c.Containers.Machine.Env; len(env) > 0 {
				return "testdata/env-" + strings.TrimPrefix(env[0], "A=")
			}
			return ""
		}},
	{key: "user", inFile: "f", inEnv: "e", asFlag: "a", also: aContainer,
		got: func(c *config) string { return c.Containers.Machine.User }},
	{key: keyContDir, inFile: "/f", inEnv: "/e", asFlag: "/a", also: aContainer,
		got: func(c *config) string { return c.Containers.Machine.WorkDir }},
	{key: "stop-signal", inFile: "TERM", inEnv: "INT", asFlag: "QUIT", also: aContainer,
		got: func(c *config) string { return c.Containers.Machine.StopSignal }},
	{key: "hostname", inFile: "f", inEnv: "e", asFlag: "a", also: aContainer,
		got: func(c *config) string { return c.Containers.Machine.Hostname }},
	{key: "tty", def: "false", inFile: "true", inEnv: "false", asFlag: "true", also: aContainer,
		got: func(c *config) string { return fmt.Sprint(c.Containers.Machine.TTY) }},
	{key: "grace", def: "0", inFile: "1", inEnv: "2", asFlag: "3", also: aContainer,
		got: func(c *config) string { return fmt.Sprint(c.Containers.Machine.Grace) }},
	{key: "cache-dir", def: "/var/lib/kubevirt-disk/.cache", inFile: "/f", inEnv: "/e",
		asFlag: "/a",
		got:    func(c *config) string { return c.Streams.CacheDir }},
	{key: "cache-size", def: "10737418240", inFile: "300000000", inEnv: "400000000",
		asFlag: "500000000",
		got:    func(c *config) string { return fmt.Sprint(c.Streams.CacheSize) }},
	{key: "unpack-memory", def: "16777216", inFile: "33554432", inEnv: "67108864",
		asFlag: "100663296",
		got:    func(c *config) string { return fmt.Sprint(c.UnpackMemory) }},
	{key: "verify", def: verifyAlways, inFile: verifyWhenComplete, inEnv: verifyAlways,
		asFlag: verifyWhenComplete, got: func(c *config) string {
			if c.Streams.WhenComplete {
				return verifyWhenComplete
			}
			return verifyAlways
		}},
	{key: keyRegistryConfig, def: "", inFile: "/f", inEnv: "/e", asFlag: "/a",
		got: func(c *config) string { return c.Streams.Registry.Config }},
	{key: "registry-ca", def: "", inFile: "/f", inEnv: "/e", asFlag: "/a",
		got: func(c *config) string { return c.Streams.Registry.CA }},
	{key: "registry-mirror", def: "", inFile: "a=f", inEnv: "a=e", asFlag: "a=a",
		got: func(c *config) string { return strings.Join(c.Streams.Registry.Mirrors, ",") }},
	{key: "insecure-registry", def: "", inFile: "f:1", inEnv: "e:1", asFlag: "a:1",
		got: func(c *config) string { return strings.Join(c.Streams.Registry.Insecure, ",") }},
	{key: keyVerifyKey, def: "", inFile: "testdata/signatures/file.pub",
		inEnv: "testdata/signatures/environment.pub", asFlag: "testdata/signatures/flag.pub",
		got: func(c *config) string { return strings.Join(c.Streams.Signatures.Keys, ",") }},
	{key: keySignaturePolicy, def: "", inFile: "testdata/signatures/file.yaml",
		inEnv: "testdata/signatures/environment.yaml", asFlag: "testdata/signatures/flag.yaml",
		got: func(c *config) string { return c.Streams.Signatures.Policy }},
	{key: keyChecksums, def: "", inFile: "f", inEnv: "e", asFlag: "a",
		got: func(c *config) string { return c.Streams.Registry.Checksums }},
	{key: keyVolumesListen, def: "none", inFile: "127.0.0.1:1", inEnv: "127.0.0.1:2",
		asFlag: "127.0.0.1:3", got: func(c *config) string {
			if c.Volumes == nil {
				return "none"
			}
			return c.Volumes.Listen.String()
		}},
	{key: "volumes-dir", def: "", inFile: "/f", inEnv: "/e", asFlag: "/a", also: onLoopback,
		got: func(c *config) string { return c.Volumes.Dir }},
	{key: keyVolumesTLSCert, inFile: "/f", inEnv: "/e", asFlag: "/a",
		also: onLoopback + " VOLUMES_TLS_KEY=/k", needed: true,
		got: func(c *config) string { return c.Volumes.Access.Cert }},
	{key: keyVolumesTLSKey, inFile: "/f", inEnv: "/e", asFlag: "/a",
		also: onLoopback + " VOLUMES_TLS_CERT=/c", needed: true,
		got: func(c *config) string { return c.Volumes.Access.Key }},
	{key: keyVolumesClientCA, def: "", inFile: "/f", inEnv: "/e", asFlag: "/a",
		also: onLoopback + " VOLUMES_TLS_CERT=/c VOLUMES_TLS_KEY=/k",
		got:  func(c *config) string { return c.Volumes.Access.ClientCA }},
	{key: keyVolumesToken, def: "", inFile: "/f", inEnv: "/e", asFlag: "/a", also: onLoopback,
		got: func(c *config) string { return c.Volumes.Access.Token }},
	{key: "volumes-portal", def: "", inFile: "f:1", inEnv: "e:2", asFlag: "[::1]:3",
		also: onLoopback, got: func(c *config) string { return c.Volumes.Portal }},
	{key: "volumes-max", def: "1024", inFile: "1", inEnv: "2", asFlag: "3", also: onLoopback,
		got: func(c *config) string { return fmt.Sprint(c.Volumes.Max) }},
	{key: "volumes-max-bytes", def: "0", inFile: "1024", inEnv: "2048", asFlag: "4096",
		also: onLoopback, got: func(c *config) string { return fmt.Sprint(c.Volumes.MaxBytes) }},
	{key: "volumes-claim", def: "", inFile: "f=/1", inEnv: "e=/2", asFlag: "c=/3",
		also: onLoopback, got: func(c *config) string {
			text := fmt.Sprint(c.Volumes.Claims)
			return strings.Replace(strings.Trim(text, "map[]"), ":", "=", 1)
		}},
	{key: "volumes-url", def: "", inFile: "https://f/1", inEnv: "http://e:2", asFlag: "https://a",
		also: onLoopback, got: func(c *config) string {
			var all []string
			for _, p := range c.Volumes.URLs {
				all = append(all, p.String())
			}
			return strings.Join(all, ",")
		}},
	{key: keyISCSI, def: "true", inFile: "false", inEnv: "true", asFlag: "false",
		also: "NBD_LISTEN=unix:/n",
		got:  func(c *config) string { return fmt.Sprint(len(c.Portals) > 0) }},
	{key: keyNBD, def: "", inFile: "unix:/f", inEnv: "127.0.0.1:1", asFlag: "[::1]:2",
		got: func(c *config) string {
			return strings.Replace(strings.Trim(fmt.Sprint(c.NBD), "[]"), "::1]", "[::1]", 1)
		}},
	{key: keyDisk, def: "", inFile: "nbds://f/x", inEnv: "nbds://e/x", asFlag: "nbds://a/x",
		got: func(c *config) string {
			if len(c.Remotes.Disks) == 0 {
				return ""
			}
			return "nbds://" + c.Remotes.Disks[0].Host + "/" + c.Remotes.Disks[0].Export
		}},
	{key: keyDiskTLSCert, def: "", inFile: "/f", inEnv: "/e", asFlag: "/a",
		also: "DISK=nbds://h/x DISK_TLS_KEY=/k", needed: true,
		got: func(c *config) string { return c.Remotes.Cert }},
	{key: keyDiskTLSKey, def: "", inFile: "/f", inEnv: "/e", asFlag: "/a",
		also: "DISK=nbds://h/x DISK_TLS_CERT=/c", needed: true,
		got: func(c *config) string { return c.Remotes.Key }},
	{key: keyDiskServerCA, def: "", inFile: "/f", inEnv: "/e", asFlag: "/a",
		also: "DISK=nbds://h/x",
		got:  func(c *config) string { return c.Remotes.ServerCA }},
	{key: keyNBDTLSCert, def: "", inFile: "/f", inEnv: "/e", asFlag: "/a",
		also: "NBD_TLS_KEY=/k NBD_CLIENT_CA=/c", needed: true,
		got: func(c *config) string { return c.NBDTLS.Cert }},
	{key: keyNBDTLSKey, def: "", inFile: "/f", inEnv: "/e", asFlag: "/a",
		also: "NBD_TLS_CERT=/k NBD_CLIENT_CA=/c", needed: true,
		got: func(c *config) string { return c.NBDTLS.Key }},
	{key: keyNBDClientCA, def: "", inFile: "/f", inEnv: "/e", asFlag: "/a",
		also: "NBD_TLS_KEY=/k NBD_TLS_CERT=/c", needed: true,
		got: func(c *config) string { return c.NBDTLS.ClientCA }},
	{key: "behind-nat", def: "false", inFile: "true", inEnv: "false", asFlag: "true",
		got: func(c *config) string { return fmt.Sprint(c.BehindNAT) }},
	{key: "insecure-no-auth", def: "false", inFile: "true", inEnv: "false", asFlag: "true",
		also: "LISTEN=0.0.0.0", fails: "false"},
	// Nothing here looks like KubeVirt.
	{key: keyKubevirtHook, def: "", inFile: "true", inEnv: "false", asFlag: "true", fails: "true"},
}

// TestEverySourceOfEverySetting sets each setting in each combination of its sources: a flag wins
// over the environment, the environment over the file, and the file over the default.
func TestEverySourceOfEverySetting(t *testing.T) {
	covered := map[string]bool{}
	for _, c := range settingCases {
		covered[c.key] = true
		row, _ := settings.Find(newConfig().settings(), c.key)
		for _, env := range row.Env {
			for sources := range 8 {
				hasFile, hasEnv, hasFlag := sources&1 != 0, sources&2 != 0, sources&4 != 0
				t.Run(fmt.Sprintf("%s/%s/file=%t,env=%t,flag=%t", c.key, env, hasFile, hasEnv,
					hasFlag), func(t *testing.T) {
					cleanEnv(t)
					for _, also := range strings.Fields(c.also) {
						name, value, _ := strings.Cut(also, "=")
						t.Setenv(name, value)
					}
					var args []string
					want := c.def
					if hasFile {
						args = append(args, "--config="+yamlFile(t, c.key+": \""+c.inFile+"\"\n"))
						want = c.inFile
					}
					if hasEnv {
						t.Setenv(env, c.inEnv)
						want = c.inEnv
					}
					if hasFlag {
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
					require.Equal(t, want, c.got(got))
				})
			}
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
	text, err := os.ReadFile(path)
	require.NoError(t, err)
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

// TestPagesThatWereChosen: only the default address of the pages may be given up.
func TestPagesThatWereChosen(t *testing.T) {
	cleanEnv(t)
	require.False(t, mustConfig(t).metricsChosen)
	require.True(t, mustConfig(t, "--metrics-listen=:9260").metricsChosen)
	require.True(t, mustConfig(t, "--config="+yamlFile(t, "metrics-listen: ':9260'")).metricsChosen)
	t.Setenv("METRICS_LISTEN", ":9260")
	require.True(t, mustConfig(t).metricsChosen)
}
