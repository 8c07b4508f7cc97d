package main

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/adapter"
	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/registry"
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
	f, err := os.Create(file)
	require.NoError(t, err)
	w := tar.NewWriter(f)
	for _, entry := range [][2]string{{"config.json", config},
		{"manifest.json", `[{"Config":"config.json","RepoTags":["hello:1"],"Layers":[]}]`}} {
		require.NoError(t, w.WriteHeader(&tar.Header{Name: entry[0], Mode: 0o644,
			Size: int64(len(entry[1]))}))
		_, err := io.WriteString(w, entry[1])
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	require.NoError(t, f.Close())
	return "docker-archive:" + file
}

// bootable makes files in place of a kernel and an initramfs, and an environment that names them.
func bootable(t *testing.T) (env []string) {
	t.Helper()
	dir := t.TempDir()
	for variable, name := range map[string]string{envKernel: "vmlinuz", envInitrd: "initrd"} {
		file := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(file, []byte(name), 0o644))
		env = append(env, variable+"="+file)
	}
	return env
}

func TestAdapt(t *testing.T) {
	env := bootable(t)
	dir := filepath.Join(t.TempDir(), "vm")
	ref := savedImage(t, "arm64")
	status, _, stderr := run(t, env, "adapt", ref, "--to", dir, "--name=web", "--env=A=1")
	require.Equal(t, exitDone, status, stderr)
	require.Contains(t, stderr, "virsh create "+filepath.Join(dir, "domain.xml"))
	content := func(name string) string {
		text, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		return string(text)
	}
	require.Equal(t, "vmlinuz", content("kernel"))
	require.Equal(t, "initrd", content("initrd"))
	domain := content("domain.xml")
	for _, part := range []string{"<name>web</name>", `arch="aarch64" machine="virt"`,
		"console=ttyAMA0", filepath.Join(dir, "disk.qcow2"), "<serial>container</serial>",
		`name="io.kubevirt.disk.0"`} {
		require.Contains(t, domain, part)
	}
	written := content("disk.qcow2")

	status, _, stderr = run(t, env, "adapt", ref, "--to", dir, "--env=A=1")
	require.Equal(t, exitDone, status, stderr)
	require.Contains(t, stderr, "in 2 levels, 2 of them existed before")
	require.Equal(t, written, content("disk.qcow2"), "the machine goes on")

	status, _, stderr = run(t, env, "adapt", ref, "--to", dir, "--", "/other")
	require.Equal(t, exitFailed, status)
	require.Contains(t, stderr, "from another version of the image, or with other arguments")
	require.Equal(t, written, content("disk.qcow2"))
}

// TestAdaptAtOnce makes the same machine several times at once. All succeed, and there is one disk.
func TestAdaptAtOnce(t *testing.T) {
	env, ref := bootable(t), savedImage(t, "amd64")
	for range 2 {
		dir := filepath.Join(t.TempDir(), "vm")
		var group sync.WaitGroup
		for range 8 {
			group.Go(func() {
				status, _, stderr := run(t, env, "adapt", ref, "--to", dir)
				assert.Equal(t, exitDone, status, stderr)
			})
		}
		group.Wait()
		files, err := os.ReadDir(dir)
		require.NoError(t, err)
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
		files, err := os.ReadDir(dir)
		require.NoError(t, err)
		for _, f := range files {
			all = append(all, f.Name())
		}
		return all
	}
	const part = ".kernel.new"
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
	text, err := os.ReadFile(filepath.Join(dir, "kernel"))
	require.NoError(t, err)
	require.Equal(t, "short", string(text))

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
		{[]string{"r.example/web:1"}, exitUsage, "--to: is missing"},
		{[]string{"UPPER CASE", to}, exitUsage, "UPPER CASE"},
		{[]string{"r.example/web:1", to, "--kernel=/none"}, exitUsage,
			`--kernel (ADAPT_KERNEL): "/none" does not exist`},
		{[]string{"r.example/web:1", to, "--env=A", "--size=much"}, exitUsage, "--env: "},
		{[]string{"r.example/web:1", to, "--stop-signal=NONSENSE"}, exitUsage,
			`--stop-signal: the stop signal "NONSENSE" is unknown: write a name such as SIGTERM`},
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

func TestDomainName(t *testing.T) {
	for text, want := range map[string]string{
		"docker.io/library/nginx:1.29":     "nginx-1.29",
		"oci:/images/web:v1":               "web-v1",
		"docker-archive:/x/ü.tar":          "tar",
		"r.example/web@sha256:" + zeroes(): "web",
	} {
		ref, err := registry.ParseReference(text)
		require.NoError(t, err, text)
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
