package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// TestInspectSeveral names files and directories; one message lists what would not be served.
func TestInspectSeveral(t *testing.T) {
	l := newPlace(t, "a.raw", "b.raw")
	dir := filepath.Join(l.dir, "disk")
	demo := absolute(t, demoImage)
	status, stdout, stderr := run(t, nil, "inspect", dir, demo)
	require.Equal(t, exitDone, status, stderr)
	require.Empty(t, stderr)
	for _, path := range []string{dir + "/a.raw", dir + "/b.raw", demo} {
		require.Contains(t, stdout, `"`+path+`"`)
	}
	require.Equal(t, 3, strings.Count(stdout, "servable"))
	var all []map[string]any
	for _, args := range [][]string{{dir, demo}, {dir}} {
		stdout, _ = works(t, nil, append([]string{"inspect", "--json"}, args...)...)
		require.NoError(t, json.Unmarshal([]byte(stdout), &all),
			"an array, also of a directory alone")
		require.Len(t, all, 1+len(args))
		require.Equal(t, dir+"/a.raw", all[0]["path"])
		require.Equal(t, "a.raw", all[0]["name"])
		require.Equal(t, true, all[0]["servable"])
	}

	notes, missing := filepath.Join(dir, "notes.txt"), filepath.Join(l.dir, "missing.raw")
	require.NoError(t, os.WriteFile(notes, []byte("buy milk\n"), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "b.vmdk"), []byte("KDMV"), 0o644))
	status, stdout, stderr = run(t, nil, "inspect", dir, missing, demo)
	require.Equal(t, exitFailed, status)
	require.Contains(t, stderr, "3 images would not be served:")
	for _, part := range []string{
		`"` + notes + `" is a text file, not a disk image; remove it`,
		`"` + dir + `/b.vmdk" is a VMDK image; convert it`, "missing.raw",
	} {
		require.Contains(t, stderr, part)
	}
	require.Contains(t, stdout, "demo.qcow2", "the good ones are shown")
	status, stdout, _ = run(t, nil, "inspect", "--json", dir, demo)
	require.Equal(t, exitFailed, status)
	require.NoError(t, json.Unmarshal([]byte(stdout), &all))
	require.Len(t, all, 5)

	empty := t.TempDir()
	stderr = fails(t, nil, exitFailed, "no disk image in", "inspect", empty)
	require.Contains(t, stderr, empty)
	status, stdout, _ = run(t, nil, "inspect", "--json", empty)
	require.Equal(t, exitFailed, status)
	require.JSONEq(t, "[]", stdout)
}

// TestInspectDirectoryAsServeDoes: a backing file needs no extension of a raw disk. It is an error
// if it is not beside the image.
func TestInspectDirectoryAsServeDoes(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "base"), bytes.Repeat([]byte("data"), 1024),
		0o644))
	filetest.QemuImg(t, dir, "create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "top.qcow2")
	stdout, _ := works(t, nil, "inspect", dir)
	require.Contains(t, stdout, `"base", raw`)
	require.NoError(t, os.Remove(filepath.Join(dir, "base")))
	status, _, stderr := run(t, nil, "inspect", dir)
	require.Equal(t, exitFailed, status)
	require.Contains(t, stderr, `has the backing file "base", which does not exist`)
}

// TestStandardInputIsNoImage: an image cannot come from a pipe, because it is not read in order.
func TestStandardInputIsNoImage(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out.raw")
	for _, args := range [][]string{{"inspect", "-"}, {"inspect", demoImage, "-"},
		{"convert", "-", out}} {
		stderr := fails(t, nil, exitFailed, "cannot be read from standard input", args...)
		require.Contains(t, stderr, `"./-"`, args)
	}
	require.NoFileExists(t, out)
}

// TestCredentialsAreNoNamesOfFiles checks that the message does not repeat the value of a
// credential.
func TestCredentialsAreNoNamesOfFiles(t *testing.T) {
	for _, args := range [][]string{{"inspect", "CHAP_PASSWORD=geheim"},
		{"convert", "CHAP_PASSWORD=geheim", "out.raw"}} {
		stderr := fails(t, nil, exitUsage, "CHAP credentials come from the environment", args...)
		require.NotContains(t, stderr, "geheim")
	}
}

// TestConvertRefusesANameThatLies: a program opens a file as the format that its name promises.
func TestConvertRefusesANameThatLies(t *testing.T) {
	dir := t.TempDir()
	source := absolute(t, demoImage)
	for name, want := range map[string]string{
		"out.VMDK": `is named like a VMDK image, but becomes a raw disk: name it "` +
			dir + `/out.raw", or keep the name with --target-format=raw`,
		"out.vhdx": "a VHDX image",
		"out.vdi":  "a VDI image",
		"out.raw.gz": `a compressed file, but becomes a raw disk: name it "` + dir +
			`/out.raw"`,
		"out.tar":      "an archive",
		"a.b.img.zstd": `name it "` + dir + `/a.b.img"`,
	} {
		for _, flags := range [][]string{nil, {"--force"}} {
			fails(t, nil, exitFailed, want,
				append(append([]string{"convert"}, flags...), source, filepath.Join(dir, name))...)
			require.NoFileExists(t, filepath.Join(dir, name))
		}
	}
	for _, args := range [][]string{{"out.img"}, {"out"}, {"disk.1"},
		{"out.raw", "--target-format=raw"}, {"out.qcow2", "--target-format", "raw"}} {
		args[0] = filepath.Join(dir, args[0])
		works(t, nil, append([]string{"convert", source}, args...)...)
		require.FileExists(t, args[0])
	}
	for _, format := range []string{"qcow", "RAW"} {
		fails(t, nil, exitUsage, "--target-format: \""+format+"\" is not a format that can be "+
			"written: use raw or qcow2", "convert", source, filepath.Join(dir, "x.raw"),
			"--target-format="+format)
	}
}

// TestConvertToStandardOutput writes the disk with its zeros into a pipe and into a file, and
// progress elsewhere.
func TestConvertToStandardOutput(t *testing.T) {
	dir := t.TempDir()
	raw := filepath.Join(dir, "disk.raw")
	source := absolute(t, demoImage)
	works(t, nil, "convert", source, raw)
	want := testtool.Must(os.ReadFile(raw))(t)
	cmd := exec.Command(binary(t), "convert", source, "-")
	cmd.Dir = dir
	var progress bytes.Buffer
	cmd.Stderr = &progress
	got := testtool.Must(cmd.Output())(t)
	require.True(t, bytes.Equal(want, got))
	require.Contains(t, progress.String(), "demo.qcow2: ")
	require.NoFileExists(t, filepath.Join(dir, "-"))

	full := testtool.Must(os.OpenFile("/dev/full", os.O_WRONLY, 0))(t)
	defer full.Close()
	cmd = exec.Command(binary(t), "convert", source, "-")
	progress.Reset()
	cmd.Stdout, cmd.Stderr = full, &progress
	require.Error(t, cmd.Run())
	require.Contains(t, progress.String(), "standard output has only a part of the disk")
	require.Contains(t, progress.String(), "no space left")
}

// TestConvertToStandardOutputInterrupted: convert can be stopped even if nobody reads its output.
func TestConvertToStandardOutputInterrupted(t *testing.T) {
	r, w := testtool.Must2(os.Pipe())(t)
	defer r.Close()
	cmd := exec.Command(binary(t), "convert", absolute(t, demoImage), "-")
	var said output
	cmd.Stdout, cmd.Stderr = w, &said
	require.NoError(t, cmd.Start())
	require.NoError(t, w.Close())
	testtool.Within(t, timeout, func() bool { return strings.Contains(said.String(), "%") },
		"it is at work: %s", func() any { return said.String() })
	require.NoError(t, cmd.Process.Signal(unix.SIGTERM))
	require.Error(t, cmd.Wait())
	require.Equal(t, exitFailed, cmd.ProcessState.ExitCode())
	require.Contains(t, said.String(), "interrupted: standard output has only a part of the disk")
}

// TestConvertDoesNotGarbleATerminal opens a terminal as a shell does.
func TestConvertDoesNotGarbleATerminal(t *testing.T) {
	terminal := openTerminal(t)
	var said bytes.Buffer
	a := &app{stdout: terminal, stderr: &said}
	err := a.convert(t.Context(), absolute(t, demoImage), "-", convertOptions{})
	require.ErrorContains(t, err, "standard output is a terminal")
	require.Empty(t, said.String())
}

// TestRegistrySettings: push, pull and adapt have the registry settings of serve, from the same
// sources.
func TestRegistrySettings(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(file, []byte("registry-config: /file\nregistry-ca: /file\n"+
		"registry-mirror: /file\ninsecure-registry: [a, 'b:1']\ncopy-mode: clone\n"), 0o600))
	t.Setenv("REGISTRY_CA", "/environment")
	t.Setenv("REGISTRY_MIRROR", "/environment")
	a := new(app)
	for _, cmd := range []*cobra.Command{a.pushCommand(), a.pullCommand(), a.adaptCommand()} {
		require.NoError(t, cmd.ParseFlags([]string{"--config", file,
			"--registry-mirror=a=b,c=d/e"}))
		var opt reach
		l := load(cmd.Flags(), opt.settings())
		require.NoError(t, l.Problems.Err())
		require.Equal(t, "/file", opt.Config)
		require.Equal(t, "/environment", opt.CA)
		require.Equal(t, []string{"a=b", "c=d/e"}, opt.Mirrors)
		require.Equal(t, []string{"a", "b:1"}, opt.Insecure)
	}
	require.NoError(t, os.WriteFile(file, []byte("registry-mirrors: x\n"), 0o600))
	cmd := a.pullCommand()
	require.NoError(t, cmd.ParseFlags([]string{"--config", file}))
	var opt reach
	l := load(cmd.Flags(), opt.settings())
	_, err := a.registryClient(l, opt, transport.Reference{})
	require.ErrorContains(t, err, "is not a setting")
}

// openTerminal returns the program's side of a new terminal.
func openTerminal(t *testing.T) *os.File {
	t.Helper()
	_, terminal := newTerminal(t)
	return terminal
}

// newTerminal returns both sides of a new terminal.
func newTerminal(t *testing.T) (person, terminal *os.File) {
	t.Helper()
	person, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("needs a terminal: %v", err)
	}
	t.Cleanup(func() { person.Close() })
	require.NoError(t, unix.IoctlSetPointerInt(int(person.Fd()), unix.TIOCSPTLCK, 0))
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, person.Fd(), unix.TIOCGPTPEER,
		unix.O_RDWR|unix.O_NOCTTY)
	if errno != 0 {
		t.Skipf("needs a terminal: %v", errno)
	}
	terminal = os.NewFile(fd, "terminal")
	t.Cleanup(func() { terminal.Close() })
	require.True(t, console.IsTerminal(terminal))
	return person, terminal
}
