package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
)

var demoImage = filepath.Join("..", "..", "examples", "demo", "disk", "demo.qcow2")

func absolute(t *testing.T, path string) string {
	t.Helper()
	return testtool.Must(filepath.Abs(path))(t)
}

func TestNoCommandIsWrongUsage(t *testing.T) {
	stderr := fails(t, nil, exitUsage, "Available Commands")
	require.Contains(t, stderr, "no command given")
	stderr = fails(t, nil, exitUsage, `"destroy"`, "destroy")
	require.Contains(t, stderr, "see kubevirt-disk --help", "which lists those that there are")
	fails(t, nil, exitUsage, `"destroy"`, "help", "destroy")
	stdout, _ := works(t, nil, "help", "serve")
	require.Contains(t, stdout, "--disk-dir")
	require.Contains(t, stdout, "help for serve")
	stdout, _ = works(t, nil, "--help")
	require.Contains(t, stdout, "Available Commands")
}

func TestVersion(t *testing.T) {
	stdout, _ := works(t, nil, "version")
	for _, part := range []string{"v0.0.0-test", "c0ffee", runtime.Version(),
		"linux/" + runtime.GOARCH} {
		require.Contains(t, stdout, part)
	}
	flag, stderr := works(t, nil, "--version")
	require.Equal(t, stdout, flag)
	require.Empty(t, stderr)
	stdout, _ = works(t, nil, "version", "--json")
	var b map[string]string
	require.NoError(t, json.Unmarshal([]byte(stdout), &b))
	require.Equal(t, map[string]string{"version": "v0.0.0-test", "commit": "c0ffee",
		"go_version": runtime.Version(),
		"platform":   "linux/" + runtime.GOARCH}, b)
	fails(t, nil, exitUsage, "", "version", "now")
}

func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		stdout, _ := works(t, nil, "completion", shell)
		require.Contains(t, stdout, "kubevirt-disk", shell)
	}
	for _, args := range [][]string{{"completion"}, {"completion", "tcsh"}} {
		fails(t, nil, exitUsage, "powershell", args...)
	}
}

func TestInspect(t *testing.T) {
	image := absolute(t, demoImage)
	stdout, _ := works(t, nil, "inspect", image)
	for _, part := range []string{"demo.qcow2", "qcow2 version 3", "virtual size", "cluster size",
		"backing file", "servable        yes"} {
		require.Contains(t, stdout, part)
	}
	stdout, _ = works(t, nil, "inspect", "--json", image)
	var info map[string]any
	require.NoError(t, json.Unmarshal([]byte(stdout), &info))
	require.Equal(t, true, info["servable"])
	require.Equal(t, "qcow2", info["format"])
	require.EqualValues(t, 3, info["version"])
	for _, key := range []string{"virtual_size", "allocated_size", "cluster_size",
		"backing_chain"} {
		require.Contains(t, info, key)
	}
	fails(t, nil, exitUsage, "--verify-key is for one image in a registry", "inspect", image,
		"--verify-key=testdata/signatures/flag.pub")
}

// A person may say that the content of an image is a guest's, whatever it looks like. The commands
// say what they assume otherwise.
func TestInspectAndConvertSayWhatIsAssumed(t *testing.T) {
	dir := t.TempDir()
	image, out := filepath.Join(dir, "a.raw"), filepath.Join(dir, "out.raw")
	content := append([]byte("LUKS\xba\xbe"), make([]byte, 4090)...)
	require.NoError(t, os.WriteFile(image, content, 0o644))
	status, stdout, _ := run(t, nil, "inspect", image)
	require.Equal(t, exitFailed, status)
	require.Contains(t, stdout, "or say --format raw (for serve, ")
	stdout, _ = works(t, nil, "inspect", "--format", "raw", image)
	require.Contains(t, stdout, "format          raw\nknown by        --format; it looks like "+
		"luks\n")
	stdout, _ = works(t, nil, "inspect", "--format", "raw", "--json", image)
	require.Contains(t, stdout, `"format_source": "told"`)
	require.Contains(t, stdout, `"looks_like": "luks"`)

	fails(t, nil, exitFailed, "say --format raw", "convert", image, out)
	_, stderr := works(t, nil, "convert", "--format=raw", image, out)
	require.Contains(t, stderr, "a.raw: raw, known by --format; it looks like luks\n")
	require.Equal(t, content, testtool.Must(os.ReadFile(out))(t))
	stdout, _ = works(t, nil, "inspect", out)
	require.Contains(t, stdout, "known by        its mark: it was made or served raw")

	for _, command := range [][]string{{"inspect", image}, {"convert", image, out + "2"}} {
		fails(t, nil, exitUsage, `--format: format "vmdk" is unknown: use raw or qcow2`,
			append(command, "--format=vmdk")...)
		status, stdout, stderr = run(t, nil, append(command, "--format=qcow2")...)
		require.Equal(t, exitFailed, status)
		require.Contains(t, stdout+stderr, "is said to be qcow2, and is a LUKS encrypted volume")
	}
	fails(t, nil, exitUsage, "is a directory: name the image in it", "inspect", "--format=raw",
		image, dir)
	stdout, _ = works(t, nil, "inspect", "--format=raw", image, out)
	require.Equal(t, 2, strings.Count(stdout, "known by        --format; it looks like luks"))
	stdout, _ = works(t, nil, "inspect", absolute(t, demoImage))
	require.Contains(t, stdout, "known by        its content; --format raw if a guest wrote it\n")
}

func TestInspectWhatWouldNotBeServed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notes.txt")
	require.NoError(t, os.WriteFile(path, []byte("not a disk"), 0o644))
	status, stdout, stderr := run(t, nil, "inspect", path)
	require.Equal(t, exitFailed, status)
	require.Empty(t, stderr, "the output says why")
	require.Contains(t, stdout, "servable   no: it ")
	status, stdout, _ = run(t, nil, "inspect", "--json", path)
	require.Equal(t, exitFailed, status)
	var info map[string]any
	require.NoError(t, json.Unmarshal([]byte(stdout), &info))
	require.Equal(t, false, info["servable"])
	require.NotEmpty(t, info["reason"])

	fails(t, nil, exitFailed, "notes.txt.missing", "inspect", path+".missing")
	fails(t, nil, exitUsage, "inspect IMAGE|DIRECTORY...", "inspect")
}

// TestInspectShowsWhatApplies inspects an image with every kind of fact, and a file about which
// nothing is known.
func TestInspectShowsWhatApplies(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, writeInfo(&b, image.Info{
		Name: "top.qcow2", Format: image.FormatQcow2, Version: 3, VirtualSize: 10 << 30,
		AllocatedSize: 1 << 20, FileSize: 196616, ClusterSize: 64 << 10,
		Compression: "zstd", Servable: true,
		BackingChain: []image.BackingInfo{{Name: "a b.qcow2", Format: image.FormatQcow2, Version: 2,
			VirtualSize: 5 << 30}, {Name: "base", Format: image.FormatRaw, VirtualSize: 512}},
	}))
	require.Equal(t, `image           "top.qcow2"
format          qcow2 version 3
known by        its content; --format raw if a guest wrote it
virtual size    10 GiB (10737418240 bytes)
allocated size  1 MiB (1048576 bytes)
file size       192 KiB (196616 bytes)
cluster size    64 KiB (65536 bytes)
compression     zstd
backing file    "a b.qcow2", qcow2 version 2, 5 GiB (5368709120 bytes)
backing file    "base", raw, 512 bytes
servable        yes
`, b.String())

	b.Reset()
	require.NoError(t, writeInfo(&b, image.Info{Name: "x", FileSize: 1024, Reason: "is strange"}))
	require.Equal(t, `image      "x"
format     unknown
file size  1 KiB (1024 bytes)
servable   no: it is strange
`, b.String())

	b.Reset()
	require.NoError(t, writeInfo(&b,
		image.Info{Name: "x.raw", Format: image.FormatRaw, Servable: true}))
	require.Contains(t, b.String(), "compression     none\nbacking file    none\n")
}

// TestConvertInterrupted: a stop leaves no file, in whatever format, and the command says so,
// unless everything is written by then.
func TestConvertInterrupted(t *testing.T) {
	dir := t.TempDir()
	source, destination := filepath.Join(dir, "a.raw"), filepath.Join(dir, "b.raw")
	require.NoError(t, os.WriteFile(source, bytes.Repeat([]byte("data"), 4096), 0o644))
	ctx, cancel := context.WithCancel(t.Context())
	// The last line comes after the file is complete.
	a := &app{stdout: io.Discard, stderr: writerFunc(func(p []byte) (int, error) {
		if _, err := os.Stat(destination); err == nil {
			cancel()
		}
		return len(p), nil
	})}
	require.NoError(t, a.convert(ctx, source, destination, convertOptions{}))
	require.FileExists(t, destination)
	require.Error(t, ctx.Err())

	require.NoError(t, os.Remove(destination))
	for _, to := range []string{destination, filepath.Join(dir, "b.qcow2")} {
		require.EqualError(t, a.convert(ctx, source, to, convertOptions{}),
			fmt.Sprintf("interrupted: %q was not written", to))
	}
	device := filepath.Join(t.TempDir(), "device")
	if unix.Mknod(device, unix.S_IFBLK|0o600, int(unix.Mkdev(7, 250))) == nil {
		require.ErrorContains(t, interrupted(device), "has only a part of the disk")
	}
	require.ErrorContains(t, a.convert(ctx, source, "-", convertOptions{targetFormat: "qcow2"}),
		"interrupted: standard output has only a part of the disk")
	require.Len(t, testtool.Must(os.ReadDir(dir))(t), 1, "nothing is left beside the image")
}

func TestConvertWhereNothingCanBeWritten(t *testing.T) {
	for _, cause := range []error{syscall.EACCES, syscall.EPERM, syscall.EROFS} {
		err := explainWrite(&fs.PathError{Op: "open", Path: "/out/b.raw.partial", Err: cause},
			"/out/b.raw")
		require.ErrorContains(t, err,
			fmt.Sprintf(`"/out/b.raw" cannot be written by user %d: `, os.Geteuid()))
		require.ErrorIs(t, err, cause)
	}
	require.NoError(t, explainWrite(nil, "/out/b.raw"))
	require.Equal(t, syscall.EIO, explainWrite(syscall.EIO, "/out/b.raw"))
}

// writerFunc is a writer made of a function.
type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestConvert(t *testing.T) {
	dir := t.TempDir()
	source, destination := filepath.Join(dir, "a.raw"), filepath.Join(dir, "b.raw")
	content := append(bytes.Repeat([]byte("data"), 4096), make([]byte, 1<<20)...)
	require.NoError(t, os.WriteFile(source, content, 0o644))

	stdout, stderr := works(t, nil, "convert", source, destination)
	require.Empty(t, stdout)
	require.Contains(t, stderr, "a.raw: 1.02 MiB")
	require.NotContains(t, stderr, "\x1b", "no bar where there is no terminal")
	got := testtool.Must(os.ReadFile(destination))(t)
	require.True(t, bytes.Equal(content, got))

	require.NoError(t, os.WriteFile(destination, []byte("precious"), 0o644))
	fails(t, nil, exitFailed, "--force", "convert", source, destination)
	got = testtool.Must(os.ReadFile(destination))(t)
	require.Equal(t, "precious", string(got))

	works(t, nil, "convert", "--force", source, destination)
	got = testtool.Must(os.ReadFile(destination))(t)
	require.True(t, bytes.Equal(content, got))

	fails(t, nil, exitFailed, "is the image", "convert", "--force", source, source)
	for _, args := range [][]string{{"convert"}, {"convert", "--force"}} {
		stderr = fails(t, nil, exitFailed, "is a directory", append(args, source, dir)...)
		require.NotContains(t, stderr, "--force", "which would not help")
	}
	fails(t, nil, exitFailed, "is a directory, not a regular file; name the image file itself",
		"convert", dir, filepath.Join(dir, "c.raw"))
	fails(t, nil, exitFailed, strconv.Quote(source)+" is not a directory", "convert", source,
		filepath.Join(source, "c.raw"))
	fails(t, nil, exitFailed, "missing.raw", "convert", filepath.Join(dir, "missing.raw"),
		filepath.Join(dir, "c.raw"))
	require.NoFileExists(t, filepath.Join(dir, "c.raw"))
	for nowhere, want := range map[string]string{
		filepath.Join(dir, "none", "c.raw"): "there is no directory " +
			strconv.Quote(filepath.Join(dir, "none")) + "; make it, or name another file",
		filepath.Join(dir, "none") + "/": "is the name of a directory: name the file in it",
	} {
		fails(t, nil, exitFailed, want, "convert", source, nowhere)
	}
	// as variables that are not set leave them
	for _, args := range [][]string{{source}, {source, ""}, {"", destination}} {
		fails(t, nil, exitUsage, "convert IMAGE DEST", append([]string{"convert"}, args...)...)
	}
}

// A person names an image outside any image directory, so messages do not mention one.
func TestConvertSaysWhatToNameInstead(t *testing.T) {
	dir := t.TempDir()
	put := func(name, content string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
		return path
	}
	link := filepath.Join(dir, "link.raw")
	require.NoError(t, os.Symlink("notes.txt", link))
	for path, want := range map[string]string{
		put("notes.txt", "buy milk\n"): "is a text file, not a disk image; name a " +
			"disk image instead",
		put("empty.raw", ""): "is empty; name a disk image instead",
		put("program", "\x7fELF\x02"): "is an ELF program or library; name a disk " +
			"image instead",
		put("disk", "\x01\x02\x03"): "name it .raw, .img or .iso if it is one, " +
			"otherwise name a disk image instead",
		put("a.raw.lz4", "\x04\x22\x4d\x18"): `unpack it with "lz4 -d" first`,
		put("a.zip", "PK\x03\x04"): "extract the disk image from it, and name " +
			"that",
		link: "is a text file, not a disk image; name a " +
			"disk image instead",
		filepath.Join(dir, "missing.raw"): "missing.raw\": does not exist; name a file that exists",
		filepath.Join(dir, "nowhere", "a.raw"): "a.raw\" cannot be opened: open " +
			filepath.Join(dir, "nowhere") + ": no such file or directory",
		filepath.Join(dir, "notes.txt", "no-image"): "no-image\" cannot be opened: open " +
			filepath.Join(dir, "notes.txt") + ": not a directory",
	} {
		destination := filepath.Join(dir, "out.raw")
		for _, args := range [][]string{{"convert", path, destination}, {"inspect", path}} {
			status, stdout, stderr := run(t, nil, args...)
			require.Equal(t, exitFailed, status, args)
			require.Contains(t, stdout+stderr, want, args)
			require.NotContains(t, stdout+stderr, "image directory", args)
			require.NoFileExists(t, destination)
		}
	}
}

// TestConvertWritesOutTheName checks that a terminal does not take the name of an image for a
// command.
func TestConvertWritesOutTheName(t *testing.T) {
	dir := t.TempDir()
	source := filepath.Join(dir, "a\x1b[2J\nb.raw")
	require.NoError(t, os.WriteFile(source, make([]byte, 4096), 0o644))
	_, stderr := works(t, nil, "convert", source, filepath.Join(dir, "out.raw"))
	require.True(t, strings.HasPrefix(stderr, `a\x1b[2J\nb.raw: raw, known by its name`), "%q",
		stderr)
	require.Contains(t, stderr, "\n"+`a\x1b[2J\nb.raw: 4 KiB`)
}

// called returns a link to the binary by which it is called by another name.
func called(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.Symlink(binary(t), path))
	return path
}

func TestCalledAsCat(t *testing.T) {
	cat := called(t, "cat")
	path := filepath.Join(t.TempDir(), "healthy")
	p := launch(t, cat, nil, path)
	require.Equal(t, exitFailed, p.status())
	require.Contains(t, p.stderr.String(), path)
	require.NoError(t, os.WriteFile(path, []byte("a\x00b\n"), 0o644))
	p = launch(t, cat, nil, path, path)
	require.Equal(t, exitDone, p.status())
	require.Equal(t, "a\x00b\na\x00b\n", p.stdout.String())
	require.Equal(t, exitFailed, launch(t, cat, nil, filepath.Dir(path)).status())
	require.Equal(t, exitUsage, launch(t, cat, nil).status())
}

// TestHelp: each command has an example that its parser takes, and no line is too wide for a
// terminal.
func TestHelp(t *testing.T) {
	root := new(app).root()
	all := append(root.Commands(), root)
	for _, c := range root.Commands() {
		all = append(all, c.Commands()...)
	}
	for _, c := range all {
		stdout, _ := works(t, nil, append(strings.Fields(c.CommandPath())[1:], "--help")...)
		for line := range strings.Lines(stdout) {
			require.LessOrEqual(t, len([]rune(strings.TrimSuffix(line, "\n"))), helpWidth, line)
		}
		if c == root || c.Name() == "help" || strings.Contains(c.CommandPath(), " completion") {
			continue
		}
		require.Contains(t, stdout, "Examples:\n  "+c.CommandPath(), c.Name())
		for line := range strings.Lines(strings.ReplaceAll(c.Example, "\\\n", " ")) {
			line, _, _ = strings.Cut(line, ">")
			_, args, err := root.Find(strings.Fields(line)[1:])
			require.NoError(t, err)
			require.NoError(t, c.ParseFlags(args), line)
		}
	}
}

func TestDidYouMean(t *testing.T) {
	for want, args := range map[string][]string{
		"did you mean serve?":    {"serv"},
		"did you mean snapshot?": {"help", "snapsho"},
		"did you mean --listen?": {"serve", "--lisen=127.0.0.1"},
		"did you mean revert?":   {"snapshot", "revet", "a.raw", "one", "--work-dir=work"},
		"did you mean generate?": {"key", "generat"},

		"--sign-key is empty":      {"push", "--sign-key=", "a.raw", "r.example/a:1"},
		"--before is empty":        {"snapshot", "create", "1", "--before="},
		"--time-limit is for --be": {"snapshot", "create", "1", "--time-limit=1s"},

		`"iqn.x" is too much`:               {"kick", "iqn.x"},
		"CHAP_PASSWORD= is not an argument": {"CHAP_PASSWORD=x", "serve", "--disk-dir=y"},
	} {
		fails(t, nil, exitUsage, want, args...)
	}
	path := filepath.Join(t.TempDir(), "b.raw")
	require.NoError(t, os.WriteFile(path, make([]byte, 512), 0o600))
	fails(t, nil, exitUsage, "the reference of the image comes last", "push", "--base=none", path,
		path)
	fails(t, nil, exitUsage, "the reference of the image comes first", "pull", path,
		"r.example/a:1")
}

func TestCalledAsEntryPoint(t *testing.T) {
	entryPoint := called(t, "entry-point.sh")
	number := testtool.Must(peers.FreePort())(t)
	port := strconv.Itoa(number)
	for name, args := range map[string][]string{"the port is the argument": {port},
		"the port is in the environment": nil} {
		t.Run(name, func(t *testing.T) {
			l := newPlace(t, "a.raw")
			env := append(l.env, "LISTEN=", "PORT=1")
			if args == nil {
				env = append(env, "PORT="+port)
			}
			p := launch(t, entryPoint, env, args...)
			p.untilReady(l)
			require.Equal(t, "127.0.0.1:"+port, p.logged("portal", "address"))
			cat := launch(t, called(t, "cat"), nil, l.readyFile())
			require.Equal(t, exitDone, cat.status())
			require.Equal(t, exitDone, p.terminate())
		})
	}
	for _, args := range [][]string{{"http"}, {"--help"}, {"1", "2"}} {
		p := launch(t, entryPoint, nil, args...)
		require.Equal(t, exitUsage, p.status(), "%v", args)
	}
	p := launch(t, entryPoint, []string{"USERNAME=vm"}, "3260")
	require.Equal(t, exitUsage, p.status())
	require.Contains(t, p.stderr.String(), "PASSWORD is not")
}
