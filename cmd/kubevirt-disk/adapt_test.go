package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/adapter"
	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// savedImage is a container image without layers, as docker saves it.
func savedImage(t *testing.T, architecture string) string {
	t.Helper()
	return savedImageWith(t, architecture, `"Cmd":["/hello"]`)
}

// savedImageWith is savedImage with this configuration.
func savedImageWith(t *testing.T, architecture, config string) string {
	t.Helper()
	config = `{"os":"linux","architecture":"` + architecture + `","config":{` + config +
		`},"rootfs":{"type":"layers","diff_ids":[]}}`
	file := filepath.Join(t.TempDir(), "hello.tar")
	f := testtool.Must(os.Create(file))(t)
	w := tar.NewWriter(f)
	for _, entry := range [][2]string{{"config.json", config},
		{"manifest.json", `[{"Config":"config.json","RepoTags":["hello:1"],"Layers":[]}]`}} {
		require.NoError(t, w.WriteHeader(&tar.Header{Name: entry[0], Mode: 0o644,
			Size: int64(len(entry[1]))}))
		require.NoError(t, testtool.Err(io.WriteString(w, entry[1])))
	}
	require.NoError(t, w.Close())
	require.NoError(t, f.Close())
	return "docker-archive:" + file
}

// bootable makes files in place of a kernel and an initramfs, and an environment that names them.
func bootable(t *testing.T) (env []string) {
	t.Helper()
	dir := t.TempDir()
	files := map[string]string{"ADAPT_KERNEL": "vmlinuz", "ADAPT_INITRD": "initrd"}
	for variable, name := range files {
		file := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(file, []byte(name), 0o644))
		env = append(env, variable+"="+file)
	}
	return env
}

func TestAdapt(t *testing.T) {
	env := bootable(t)
	dir := filepath.Join(t.TempDir(), "my vm")
	ref := savedImage(t, "arm64")
	_, stderr := works(t, env, "adapt", ref, "--to", dir, "--name=web", "--env=A=1")
	require.Contains(t, stderr, "virsh create '"+filepath.Join(dir, "domain.xml")+"' ")
	content := func(name string) string {
		text := testtool.Must(os.ReadFile(filepath.Join(dir, name)))(t)
		return string(text)
	}
	require.Equal(t, "vmlinuz", content("kernel")[:7])
	require.Equal(t, "initrd", content("initrd")[:6])
	domain := content("domain.xml")
	for _, part := range []string{"<name>web</name>", `arch="aarch64" machine="virt"`,
		"console=ttyAMA0", filepath.Join(dir, "disk.qcow2"), "<serial>container</serial>",
		`name="io.kubevirt.disk.0"`} {
		require.Contains(t, domain, part)
	}
	written := content("disk.qcow2")

	_, stderr = works(t, env, "adapt", ref, "--to", dir, "--env=A=1")
	require.Contains(t, stderr, "in 2 levels, 2 of them existed before")
	require.Equal(t, written, content("disk.qcow2"), "the machine goes on")
}

// TestAdaptReplacesOnlyItsOwn: a kernel of somebody else is not replaced, but may be used.
func TestAdaptReplacesOnlyItsOwn(t *testing.T) {
	env, dir := bootable(t), t.TempDir()
	ref := savedImage(t, "arm64")
	for _, name := range []string{"kernel", "initrd", "domain.xml"} {
		file := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(file, []byte("precious"), 0o600))
		fails(t, env, exitUsage, file, "adapt", ref, "--to", dir)
		require.Equal(t, "precious", string(testtool.Must(os.ReadFile(file))(t)))
		require.NoError(t, os.Remove(file))
	}
	_, given, _ := strings.Cut(env[0], "=")
	works(t, env, "adapt", ref, "--to", filepath.Dir(given))
}

// TestAdaptAgain: with another configuration, the machine goes on with what it wrote. What cannot
// be is refused before anything is replaced.
func TestAdaptAgain(t *testing.T) {
	env := bootable(t)
	dir := filepath.Join(t.TempDir(), "vm")
	file := filepath.Join(dir, "disk.qcow2")
	ref := savedImage(t, "amd64")
	adapt := func(args ...string) (status int, stderr string) {
		status, _, stderr = run(t, env, append([]string{"adapt", ref, "--to", dir}, args...)...)
		return status, stderr
	}
	content := func() (all map[string]string) {
		all = map[string]string{}
		for _, name := range []string{"disk.qcow2", "kernel", "initrd", "domain.xml"} {
			text := testtool.Must(os.ReadFile(filepath.Join(dir, name)))(t)
			all[name] = string(text)
		}
		return all
	}
	configured := func() string {
		img := testtool.Must(image.Open(file, image.Options{}))(t)
		defer img.Close()
		config, mine := make([]byte, 4096), make([]byte, 4)
		require.NoError(t, testtool.Err(img.ReadAt(t.Context(), config, machine.ConfigOffset)))
		require.NoError(t, testtool.Err(img.ReadAt(t.Context(), mine, 1<<30)))
		require.Equal(t, "mine", string(mine))
		return strings.TrimRight(string(config), "\x00")
	}
	status, stderr := adapt("--env=A=1")
	require.Equal(t, exitDone, status, stderr)
	// The machine writes.
	out, err := exec.Command("qemu-io", "-c", "write -P 109 1G 1", "-c",
		"write -P 105 1073741825 1",
		"-c", "write -P 110 1073741826 1", "-c", "write -P 101 1073741827 1", file).CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		t.Skip("needs qemu-io")
	}
	require.NoError(t, err, "%s", out)
	require.Contains(t, configured(), `"A=1"`)
	for _, c := range []struct{ arg, want string }{
		{"--env=A=2", `"A=2"`}, {"--grace=30", `"grace":30`}, {"--env=A=1", `"A=1"`},
	} {
		status, stderr = adapt(c.arg, "--publish=8080:80")
		require.Equal(t, exitDone, status, stderr)
		require.Contains(t, configured(), c.want)
	}
	require.Contains(t, content()["domain.xml"], "hostfwd=tcp:127.0.0.1:8080-:80")

	// The image has other layers now, the machine is to be larger, or it runs.
	before := content()
	env = bootable(t)
	for _, variable := range env {
		_, name, _ := strings.Cut(variable, "=")
		other := testtool.Must(os.OpenFile(name, os.O_WRONLY, 0))(t)
		_, err := other.WriteString("other")
		require.NoError(t, errors.Join(err, other.Close()))
	}
	status, stderr = adapt("--size=20Gi")
	require.Equal(t, exitFailed, status)
	require.Contains(t, stderr, "qemu-img resize "+file+" 21474836480")
	require.Equal(t, before, content())

	f := testtool.Must(os.Open(file))(t)
	used := unix.Flock_t{Type: unix.F_RDLCK, Start: 201, Len: 1} // as QEMU does
	require.NoError(t, unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &used))
	status, stderr = adapt("--env=A=3")
	require.Equal(t, exitFailed, status)
	require.Contains(t, stderr, "in use by a running machine: shut it down")
	require.Equal(t, before, content())
	require.NoError(t, f.Close())

	ref = layeredImage(t, 1)
	status, stderr = adapt("--env=A=1")
	require.Equal(t, exitFailed, status)
	require.Contains(t, stderr, "from another version of the image: move it away")
	require.Equal(t, before, content())
}

// TestAdaptAtOnce makes the same machine several times at once. All succeed, and there is one disk.
func TestAdaptAtOnce(t *testing.T) {
	env, ref := bootable(t), savedImage(t, "amd64")
	for range 2 {
		dir := filepath.Join(t.TempDir(), "vm")
		var group sync.WaitGroup
		for range 8 {
			group.Go(func() {
				status, _, stderr := apart(t, env, "adapt", ref, "--to", dir)
				assert.Equal(t, exitDone, status, stderr)
			})
		}
		group.Wait()
		files := testtool.Must(os.ReadDir(dir))(t)
		var names []string
		for _, f := range files {
			if !adapter.IsLevel(f.Name()) {
				names = append(names, f.Name())
			}
		}
		require.Equal(t, []string{"disk.qcow2", "domain.xml", "empty.v1.state", "initrd",
			"kernel"}, names)
	}
}

// TestAdaptLeavesNoCopies checks that killed copies do not pile up: the next one takes over the
// unfinished file.
func TestAdaptLeavesNoCopies(t *testing.T) {
	dir := t.TempDir()
	names := func() (all []string) {
		files := testtool.Must(os.ReadDir(dir))(t)
		for _, f := range files {
			all = append(all, f.Name())
		}
		return all
	}
	const part = "kernel.partial"
	left := filepath.Join(dir, part)
	require.NoError(t, os.WriteFile(left, []byte("longer than what comes"), 0o600))
	var during []string
	err := replaceFile(filepath.Join(dir, "kernel"), io.MultiReader(strings.NewReader("short"),
		readerFunc(func([]byte) (int, error) {
			during = names()
			return 0, io.EOF
		})))
	require.NoError(t, err)
	require.Equal(t, []string{part}, during)
	require.Equal(t, []string{"kernel"}, names())
	require.Equal(t, "short", string(testtool.Must(os.ReadFile(filepath.Join(dir, "kernel")))(t)))

	failure := errors.New("it cannot be read")
	err = replaceFile(filepath.Join(dir, "kernel"), readerFunc(func([]byte) (int, error) {
		return 0, failure
	}))
	require.ErrorIs(t, err, failure)
	require.Equal(t, []string{"kernel"}, names())
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func TestAdaptRefuses(t *testing.T) {
	env := bootable(t)
	to := "--to=" + t.TempDir()
	for _, c := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{}, exitUsage, "usage is"},
		{[]string{"r.example/web:1"}, exitUsage, "--to is missing"},
		{[]string{"UPPER CASE", to}, exitUsage, "UPPER CASE"},
		{[]string{"r.example/web:1", to, "--kernel=/none"}, exitUsage,
			`--kernel (ADAPT_KERNEL): "/none" does not exist`},
		{[]string{"r.example/web:1", to, "--env=A", "--size=much"}, exitUsage, "--env: "},
		{[]string{"r.example/web:1", to, "--hostname=a b"}, exitUsage,
			`--hostname: "a b" cannot be the name of a machine`},
		{[]string{"r.example/web:1", to, "--stop-signal=NONSENSE"}, exitUsage,
			`--stop-signal: the stop signal "NONSENSE" is unknown: write a name such as SIGTERM`},
		{[]string{"r.example/web:1", to, "--grace=100000"}, exitUsage, "--grace: 100000 is more"},
		{[]string{"r.example/web:1", to, "--name=a/b"}, exitUsage, "--name: "},
		{[]string{"r.example/web:1", to, "--cpus=0"}, exitUsage, `--cpus: "0" is not a number`},
		{[]string{"r.example/web:1", to, "--memory-mib=0"}, exitUsage, "--memory-mib: "},
		{[]string{"r.example/web:1", "--to=/dev/null"}, exitUsage, `--to: "/dev/null" is not a dir`},
		{[]string{"r.example/web:1", to, "--publish=80"}, exitUsage, `--publish: "80" is not`},
		{[]string{"r.example/web:1", to, "--publish=[::1]:80:80"}, exitUsage, "IPv4"},
		{[]string{"r.example/web:1", to, "--kernel=/"}, exitUsage,
			"--kernel (ADAPT_KERNEL): open /: it is a directory"},
		{[]string{"docker-archive:/none", to}, exitFailed, "/none"},
		{[]string{"oci:/no/such", to}, exitFailed, `there is no directory "/no/such"`},
		{[]string{savedImageWith(t, "amd64", `"StopSignal":"NONSENSE"`), to}, exitFailed,
			`the stop signal "NONSENSE" is unknown`},
		{[]string{savedImage(t, "s390x"), to}, exitFailed, `it is made for "s390x"`},
	} {
		status, _, stderr := run(t, env, append([]string{"adapt"}, c.args...)...)
		require.Equal(t, c.status, status, "%v: %s", c.args, stderr)
		require.Contains(t, stderr, c.want)
	}
}

// TestAdaptForAnotherMachine: the usual kernel is this machine's, and boots no other. A kernel that
// a person names is what it is.
func TestAdaptForAnotherMachine(t *testing.T) {
	usual := adaptOptions{kernel: defaultKernel, initrd: defaultInitrd}
	require.NoError(t, usual.fits(runtime.GOARCH))
	require.ErrorContains(t, usual.fits("s390x"), "the image is made for s390x, and this program's")
	half := adaptOptions{kernel: "/mine", initrd: defaultInitrd}
	require.ErrorContains(t, half.fits("s390x"), "and its initramfs")
	named := adaptOptions{kernel: "/mine", initrd: "/mine too"}
	require.NoError(t, named.fits("s390x"))
}

func TestDomainName(t *testing.T) {
	for text, want := range map[string]string{
		"docker.io/library/nginx:1.29":     "nginx-1.29",
		"oci:/images/web:v1":               "web-v1",
		"docker-archive:/x/ü.tar":          "tar",
		"r.example/web@sha256:" + zeroes(): "web",
	} {
		ref := testtool.Must(transport.ParseReference(text))(t, text)
		require.Equal(t, want, domainName(ref))
	}
}

func zeroes() string { return "0000000000000000000000000000000000000000000000000000000000000000" }

// TestMachineFindsItsConfiguration: the guest's init has the offset of the configuration as a
// constant, because it cannot import the package that makes the disk.
func TestMachineFindsItsConfiguration(t *testing.T) {
	require.EqualValues(t, adapter.ConfigOffset, machine.ConfigOffset)
	require.EqualValues(t, adapter.MaxConfig, machine.ConfigSize)
}

// layeredImage is a container image with several layers, as docker saves it. Each replaces files of
// the one below.
func layeredImage(t *testing.T, layers int) string {
	t.Helper()
	add := func(w *tar.Writer, name string, content []byte) {
		require.NoError(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o644,
			Size: int64(len(content))}))
		require.NoError(t, testtool.Err(w.Write(content)))
	}
	var saved bytes.Buffer
	out := tar.NewWriter(&saved)
	random := rand.NewChaCha8([32]byte{4})
	var names, ids []string
	for i := range layers {
		var layer bytes.Buffer
		w := tar.NewWriter(&layer)
		for j := range 100 {
			content := make([]byte, 20000)
			_, _ = random.Read(content)
			add(w, fmt.Sprintf("d%d/f%d", j%10, j+50*i), content)
		}
		require.NoError(t, w.Close())
		name := fmt.Sprintf("%d.tar", i)
		add(out, name, layer.Bytes())
		names = append(names, name)
		ids = append(ids, fmt.Sprintf("sha256:%x", sha256.Sum256(layer.Bytes())))
	}
	encode := func(v any) []byte {
		return testtool.Must(json.Marshal(v))(t)
	}
	add(out, "config.json", encode(map[string]any{"os": "linux", "architecture": "amd64",
		"config": map[string]any{"Cmd": []string{"/hello"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": ids}}))
	add(out, "manifest.json", encode([]map[string]any{{"Config": "config.json", "Layers": names}}))
	require.NoError(t, out.Close())
	file := filepath.Join(t.TempDir(), "layered.tar")
	require.NoError(t, os.WriteFile(file, saved.Bytes(), 0o644))
	return "docker-archive:" + file
}

// TestAdaptKilled kills adapt at any moment, again and again. What it makes when it is left alone
// is then the same as without that, and nothing else is there.
func TestAdaptKilled(t *testing.T) {
	env, ref := bootable(t), layeredImage(t, 5)
	path := filepath.Join(t.TempDir(), "vm")
	args := []string{"adapt", ref, "--to", path}
	content := func() map[string][sha256.Size]byte {
		files := testtool.Must(os.ReadDir(path))(t)
		all := map[string][sha256.Size]byte{}
		for _, f := range files {
			text := testtool.Must(os.ReadFile(filepath.Join(path, f.Name())))(t)
			all[f.Name()] = sha256.Sum256(text)
		}
		return all
	}
	binary(t) // so that this is not measured
	began := time.Now()
	works(t, env, args...)
	took, want := time.Since(began), content()

	left := 0 // files that are not complete, of killed processes
	require.NoError(t, os.RemoveAll(path))
	for killed := 0; killed < 10; {
		p := launch(t, binary(t), env, args...)
		time.Sleep(rand.N(took))
		_ = p.cmd.Process.Kill()    // it may have ended by itself
		if p.status() == exitDone { // it was sooner: make everything again
			require.NoError(t, os.RemoveAll(path))
			continue
		}
		killed++
		if _, err := os.Stat(path); err == nil {
			for name := range content() {
				if strings.HasSuffix(name, ".partial") {
					left++
				}
			}
		}
	}
	t.Logf("an undisturbed run takes %v; killed ones have left %d files", took, left)
	works(t, env, args...)
	got := content()
	require.Equal(t, slices.Sorted(maps.Keys(want)), slices.Sorted(maps.Keys(got)))
	require.Equal(t, want, got)
}
