package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

func TestServeFromStartToStop(t *testing.T) {
	l := newPlace(t, "disk10.raw", "disk2.img")
	p := l.serve(t)

	portal, _ := p.logged("portal", "address").(string)
	c, err := net.Dial("tcp", portal)
	require.NoError(t, err, "the portal that the log names accepts connections")
	require.NoError(t, c.Close())

	code, body := p.page("/readyz")
	require.Equal(t, http.StatusOK, code, body)
	code, body = p.page("/healthz")
	require.Equal(t, http.StatusOK, code, body)

	var s status.Status
	p.until("both disks are complete", func() bool {
		code, body = p.page("/status")
		require.Equal(t, http.StatusOK, code)
		s = status.Status{}
		require.NoError(t, json.Unmarshal([]byte(body), &s))
		return s.LUNs[0].Copy.Complete && s.LUNs[1].Copy.Complete
	})
	require.Positive(t, s.ReadyAfterSeconds)
	require.True(t, s.Ready)
	require.Equal(t, status.StateReady, s.State)
	require.NotNil(t, s.ReadyAt)
	require.Equal(t, "iqn.2017-01.io.kubevirt:wrapper", s.TargetName)
	require.Equal(t, []string{portal}, s.Portals)
	require.Equal(t, "none", s.Authentication)
	require.Equal(t, "v0.0.0-test", s.Build.Version)
	require.Equal(t, "c0ffee", s.Build.Commit)
	require.Len(t, s.LUNs, 2)
	require.Equal(t, []string{"disk2.img", "disk10.raw"},
		[]string{s.LUNs[0].Image, s.LUNs[1].Image}, "natural order")
	for i, lun := range s.LUNs {
		require.EqualValues(t, i+1, lun.LUN)
		require.True(t, lun.Ready)
		require.Equal(t, lun.SizeBytes, lun.Copy.TotalBytes)
		require.Equal(t, lun.Copy.DataBytes, lun.Copy.CopiedBytes)
		require.NotEmpty(t, lun.Serial)
		require.Len(t, lun.NAA, 16)
	}
	require.NotEqual(t, s.LUNs[0].Serial, s.LUNs[1].Serial)
	require.EqualValues(t, 8192, s.LUNs[0].SizeBytes)

	_, body = p.page("/metrics")
	for _, line := range []string{
		`kubevirt_disk_lun_size_bytes{image="disk2.img",lun="1"} 8192`,
		`kubevirt_disk_image_data_bytes{image="disk10.raw",lun="2"} 4096`,
		"kubevirt_disk_ready 1", "kubevirt_disk_panics_caught_total 0",
		`kubevirt_disk_build_info{commit="c0ffee",`,
	} {
		require.Contains(t, body, line)
	}
	require.Equal(t, "ready\n", string(testtool.Must(os.ReadFile(l.readyFile()))(t)))

	require.Equal(t, exitDone, p.terminate())
	require.NoFileExists(t, l.readyFile())
	require.Error(t, testtool.Err(net.Dial("tcp", portal)))
	require.NotNil(t, p.logged("stopped", "msg"))
}

// TestServeOutlivesTheReaderOfItsLog checks that a daemon whose log reader has gone stops as
// cleanly as any other.
func TestServeOutlivesTheReaderOfItsLog(t *testing.T) {
	l := newPlace(t, "a.raw")
	path := filepath.Join(l.dir, "log")
	require.NoError(t, syscall.Mkfifo(path, 0o600))
	// O_RDWR, so that opening does not wait for the daemon
	reader := testtool.Must(os.OpenFile(path, os.O_RDWR, 0))(t)
	p := launch(t, "/bin/sh", append(l.env, "LOG="+path), "-c", `exec "$0" serve 2>"$LOG"`,
		binary(t))
	p.until("the ready file is there", func() bool { return exists(l.readyFile()) })
	require.NoError(t, reader.Close())
	require.Equal(t, exitDone, p.terminate())
	require.NoFileExists(t, l.readyFile())
}

// TestServeFailures are starts that end with status 1: the configuration is right, but the disks or
// the machine are not.
func TestServeFailures(t *testing.T) {
	taken := testtool.Must(net.Listen("tcp4", "127.0.0.1:0"))(t)
	defer taken.Close()
	takenToo := testtool.Must(net.Listen("tcp4", "127.0.0.1:0"))(t)
	defer takenToo.Close()
	for name, c := range map[string]struct {
		env  []string
		make func(l place)
		want []string
	}{
		"no image": {want: []string{"{dir}/disk", "no disk image", "DISK_DIR"}},
		"no directory": {make: func(l place) { os.Remove(filepath.Join(l.dir, "disk")) },
			want: []string{"{dir}/disk", "does not exist", "DISK_DIR"}},
		"no directory but a file": {env: []string{"DISK_DIR=/etc/passwd"},
			want: []string{`"/etc/passwd" is not a directory`, "DISK_DIR"}},
		"files that are none": {make: strayFiles,
			want: []string{`2 files in "{dir}/disk"`, `"notes.txt": `, `"small.raw": `}},
		"a portal that's taken": {env: []string{"LISTEN=" + taken.Addr().String()},
			make: rawImage, want: []string{taken.Addr().String(), "taken", "--port (PORT)"}},
		"pages that are taken": {env: []string{"METRICS_LISTEN=" + taken.Addr().String()},
			make: rawImage, want: []string{taken.Addr().String(), "taken",
				"--metrics-listen (METRICS_LISTEN)"}},
		"both are taken": {env: []string{"LISTEN=" + taken.Addr().String(),
			"METRICS_LISTEN=" + takenToo.Addr().String()}, make: rawImage,
			want: []string{"metrics address " + takenToo.Addr().String(),
				"portal " + taken.Addr().String(), "another container of the pod"}},
		"ready file in nowhere": {env: []string{"READY_FILE=/does/not/exist/healthy"},
			make: rawImage, want: []string{"/does/not/exist", "--ready-file"}},
		"ready file in the way": {env: []string{"READY_FILE=/proc"}, make: rawImage,
			want: []string{"/proc", "ready file"}},
		"work directory": {env: []string{"WORK_DIR=/proc/work"}, make: rawImage,
			want: []string{"/proc/work"}},
		"work directory that is a file": {env: []string{"WORK_DIR=/etc/passwd"}, make: rawImage,
			want: []string{`"/etc/passwd" is not a directory`, "--work-dir (WORK_DIR)"}},
		"work directory in a file": {env: []string{"WORK_DIR=/etc/passwd/work"}, make: rawImage,
			want: []string{`"/etc/passwd/work" is not a directory`, "--work-dir (WORK_DIR)"}},
		"sockets in a file": {env: []string{"VHOST_USER_DIR=/etc/passwd/sockets"}, make: rawImage,
			want: []string{`"/etc/passwd/sockets" is not a directory`,
				"--vhost-user (VHOST_USER_DIR)"}},
		"sockets in nowhere": {env: []string{"VHOST_USER_DIR=/proc/sockets"}, make: rawImage,
			want: []string{"/proc/sockets"}},
	} {
		t.Run(name, func(t *testing.T) {
			l := newPlace(t)
			if c.make != nil {
				c.make(l)
			}
			for _, format := range []string{"json", "console"} {
				status, _, stderr := run(t, append(append(l.env, "LOG_FORMAT="+format), c.env...),
					"serve")
				require.Equal(t, exitFailed, status, stderr)
				for _, part := range c.want {
					require.Contains(t, told(stderr), strings.ReplaceAll(part, "{dir}", l.dir))
				}
				if format == "json" {
					require.NotContains(t, told(stderr), "\n")
				}
				require.NoFileExists(t, l.readyFile())
				require.Equal(t, format == "json",
					strings.Contains(stderr, `"msg":"serving has failed"`), "for programs")
				require.Equal(t, format == "console", strings.Contains(stderr, "kubevirt-disk: "),
					"for people, and either only once")
			}
		})
	}
}

// told returns what was printed, or the error of a log entry.
func told(stderr string) string {
	for line := range strings.Lines(stderr) {
		var entry struct{ Error string }
		if json.Unmarshal([]byte(line), &entry) == nil && entry.Error != "" {
			return entry.Error
		}
	}
	return stderr
}

func rawImage(l place) {
	_ = os.WriteFile(filepath.Join(l.dir, "disk", "a.raw"), make([]byte, 4096), 0o644)
}

func strayFiles(l place) {
	rawImage(l)
	_ = os.WriteFile(filepath.Join(l.dir, "disk", "notes.txt"), []byte("hello"), 0o644)
	_ = os.WriteFile(filepath.Join(l.dir, "disk", "small.raw"), make([]byte, 100), 0o644)
}

func TestServeRefusesWrongConfigurations(t *testing.T) {
	l := newPlace(t, "a.raw")
	for name, c := range map[string]struct {
		env, args []string
		want      []string
	}{
		"several": {env: []string{"COPY_MODE=x", "LOG_LEVEL=y"},
			want: []string{"2 errors", "COPY_MODE", "LOG_LEVEL"}},
		"unknown flag": {args: []string{"--disks=/x"}, want: []string{"--disks", "serve --help"}},
		"password flag": {args: []string{"--chap-password=" + testSecret},
			want: []string{"--chap-password", "CHAP_PASSWORD_FILE"}},
		"user short": {args: []string{"-u" + testSecret},
			want: []string{"-u", "CHAP_PASSWORD_FILE"}},
		"password short": {args: []string{"-p" + testSecret},
			want: []string{"-p", "CHAP_PASSWORD_FILE"}},
		"password, bare": {args: []string{"CHAP_PASSWORD=" + testSecret},
			want: []string{"CHAP_PASSWORD=", "environment", "CHAP_PASSWORD_FILE"}},
		"argument": {args: []string{"image.qcow2"},
			want: []string{`"image.qcow2" does not exist`, "--disk-dir"}},
		"variable": {args: []string{"COPY_MODE=none"},
			want: []string{"COPY_MODE=none", "--disk-dir"}},
		"half a word": {args: []string{"chap"}, want: []string{`"chap"`, "--disk-dir"}},
	} {
		t.Run(name, func(t *testing.T) {
			status, stdout, stderr := run(t, append(l.env, c.env...),
				append([]string{"serve"}, c.args...)...)
			require.Equal(t, exitUsage, status, stderr)
			require.Empty(t, stdout)
			for _, part := range c.want {
				require.Contains(t, stderr, part)
			}
			require.NotContains(t, stderr, testSecret)
		})
	}
}

func TestServeRefusesAnImageThatItsCopyModeCannotServe(t *testing.T) {
	l := newPlace(t)
	text, err := os.ReadFile(filepath.Join("..", "..", "examples", "demo", "disk", "demo.qcow2"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(l.dir, "disk", "demo.qcow2"), text, 0o644))
	status, _, stderr := run(t, append(l.env, "COPY_MODE=none"), "serve")
	require.Equal(t, exitUsage, status, stderr)
	for _, part := range []string{"COPY_MODE", "demo.qcow2", "clone"} {
		require.Contains(t, stderr, part)
	}
}

// TestServeRefusesDisksThatLookTheSame checks identities from the settings, and those that an
// earlier start gave to a disk.
func TestServeRefusesDisksThatLookTheSame(t *testing.T) {
	l := newPlace(t, "a.raw", "b.raw")
	refuses := func(want int, settings string, parts ...string) {
		status, _, stderr := run(t, l.env, "serve", "--config="+yamlFile(t, settings))
		require.Equal(t, want, status, stderr)
		for _, part := range append(parts, `LUN 1 ("a.raw") and LUN 2 ("b.raw")`, `"disks"`) {
			require.Contains(t, told(stderr), part)
		}
	}
	refuses(exitUsage, "disks: {a.raw: {serial: same}, b.raw: {serial: same}}",
		"serial number, same,")
	refuses(exitUsage, "disks: {a.raw: {serial: a, naa: '3000000000000001'}, b.raw: {serial: b, "+
		"naa: '0x3000000000000001'}}", "NAA identifier, 3000000000000001,")
	require.NoDirExists(t, filepath.Join(l.dir, "work", "a.raw"),
		"it would keep the number after the settings were put right")
	p := l.serve(t, settings.EnvConfig+"="+yamlFile(t,
		"disks: {a.raw: {serial: a, naa: '3000000000000001'}}"))
	require.Equal(t, exitDone, p.terminate())
	refuses(exitUsage, "disks: {b.raw: {serial: a, naa: '3000000000000001'}}", "serial number, a,",
		"NAA identifier")
	p = l.serve(t, settings.EnvConfig+"="+yamlFile(t,
		"disks: {b.raw: {serial: b, naa: '3000000000000002'}}"))
	require.Equal(t, "a", p.logged("serving a LUN", "serial"), "kept from before")
	require.Equal(t, exitDone, p.terminate())
}

// TestServeWithFewDescriptors checks that the message says what to do if there are too few
// descriptors, for the images or for their disks.
func TestServeWithFewDescriptors(t *testing.T) {
	var images []string
	for i := range 40 {
		images = append(images, fmt.Sprintf("%d.raw", i))
	}
	l := newPlace(t, images...)
	for _, limit := range []string{"30", "80"} {
		p := launch(t, "/bin/sh", l.env, "-c", "ulimit -n "+limit+`; exec "$0" serve`, binary(t))
		require.Equal(t, exitFailed, p.status())
		require.Contains(t, p.stderr.String(), "too many open files")
		require.Contains(t, p.stderr.String(), "ulimit -n")
	}
}

// TestASecondStartLeavesTheFirstReady starts a second daemon with the same settings.
func TestASecondStartLeavesTheFirstReady(t *testing.T) {
	l := newPlace(t, "a.raw")
	p := l.serve(t)
	portal, _ := p.logged("portal", "address").(string)
	for _, taken := range []string{"LISTEN=" + portal,
		"METRICS_LISTEN=" + p.logged("metrics", "address").(string)} {
		fails(t, append(l.env, taken), exitFailed, "taken", "serve")
		require.FileExists(t, l.readyFile())
	}
	require.Equal(t, exitDone, p.terminate())
	require.NoFileExists(t, l.readyFile())
}

// TestServeRefusesToKeepDisksAmongImages uses one directory for images and disks: the next start
// would take the disk's files for images.
func TestServeRefusesToKeepDisksAmongImages(t *testing.T) {
	l := newPlace(t, "a.raw")
	images := filepath.Join(l.dir, "disk")
	link := filepath.Join(l.dir, "link")
	require.NoError(t, os.Symlink(images, link))
	for env, name := range map[string]string{
		"PERSISTENT_DIR=" + images: "--persistent-dir (PERSISTENT_DIR)",
		"PERSISTENT_DIR=" + link:   "--persistent-dir (PERSISTENT_DIR)",
		"WORK_DIR=" + images:       "--work-dir (WORK_DIR)",
	} {
		stderr := fails(t, append(l.env, env), exitUsage, name, "serve")
		require.Contains(t, stderr, "--disk-dir")
		require.Len(t, testtool.Must(os.ReadDir(images))(t), 1, "nothing was made there")
	}
	require.NoError(t, os.Mkdir(filepath.Join(images, "disks"), 0o700))
	p := l.serve(t, "PERSISTENT_DIR="+filepath.Join(images, "disks"))
	require.Equal(t, exitDone, p.terminate())
	p = l.serve(t, "PERSISTENT_DIR="+filepath.Join(images, "disks"))
	require.Equal(t, exitDone, p.terminate())
}

// TestNoSecretIsShown serves with CHAP in both directions, and looks for the secrets in everything
// visible.
func TestNoSecretIsShown(t *testing.T) {
	const mutual = "another-correct-horse-battery"
	l := newPlace(t, "a.raw")
	p := l.serve(t, "LOG_LEVEL=debug", "CHAP_USERNAME=user", "CHAP_PASSWORD="+testSecret,
		"CHAP_MUTUAL_USERNAME=target", "CHAP_MUTUAL_PASSWORD="+mutual)
	var seen []string
	for _, path := range []string{"/status", "/metrics", "/readyz", "/healthz", "/nothing"} {
		_, body := p.page(path)
		seen = append(seen, body)
	}
	require.Contains(t, seen[0], `"mutual-chap"`)
	cmdline, err := os.ReadFile("/proc/" + strconv.Itoa(p.cmd.Process.Pid) + "/cmdline")
	require.NoError(t, err)
	require.Equal(t, exitDone, p.terminate())
	for _, text := range append(seen, p.stdout.String(), p.stderr.String(), string(cmdline)) {
		require.NotContains(t, text, testSecret)
		require.NotContains(t, text, mutual)
	}
	for _, args := range [][]string{{"version"}, {"serve", "--help"}, {"healthcheck"},
		{"inspect", "/nothing"}, {"serve", "--port=x"}, {}} {
		_, stdout, stderr := run(t,
			append(l.env, "CHAP_USERNAME=user", "CHAP_PASSWORD="+testSecret), args...)
		require.NotContains(t, stdout+stderr, testSecret)
	}
}
