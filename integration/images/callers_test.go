package images

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/targettest"
)

// asWrapper is the command that the original wrapper's callers use.
func asWrapper(port string) string {
	return fmt.Sprintf(`--entrypoint=["/entry-point.sh",%q]`,
		port)
}

// TestImageOriginalCallers starts containers like the controller of the first KubeVirt releases:
// two disks in one pod, each with its port as the command's argument and in the environment, a
// target name, a secret of 32 random bytes encoded twice, and `cat /tmp/healthy` as readiness
// probe. It sets nothing else.
func TestImageOriginalCallers(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img", rig.QEMUISCSI)
	image, source := oneDisk(t, e)
	n := rig.Namespace(t)
	secret := func() string {
		random := make([]byte, 32)
		_, _ = rand.Read(random) // never fails
		return base64.URLEncoding.EncodeToString(random)
	}
	user, password := secret(), secret()
	require.Len(t, password, 44)
	var first *rig.Container
	for _, port := range []string{"3261", "3262"} {
		wwn := "iqn.2017-01.io.kubevirt:disk-" + port
		c := e.NewContainer(t, image,
			append([]string{n.Option(), asWrapper(port)}, rig.WithEnv("PORT="+port, "WWN="+wwn,
				"USERNAME_BASE64="+base64.StdEncoding.EncodeToString([]byte(user)),
				"PASSWORD_BASE64="+base64.StdEncoding.EncodeToString([]byte(password)))...))
		c.Start(t)
		rig.UntilReady(t, c)
		if first == nil {
			first = c
		}
		require.Equal(t, "0.0.0.0:"+port, rig.Logged(c.Log(t), "portal", "address"))
		url := fmt.Sprintf("iscsi://%s%%%s@%s:%s/%s/1", user, password, n.Host, port, wwn)
		rig.Same(t, source, url)
		if port == "3262" {
			require.Contains(t, c.Log(t), "no metrics and status pages: their port is taken",
				"the containers of the pod share one network")
			require.Zero(t, c.Exec(t, "kubevirt-disk", "healthcheck").Status,
				"the ready file must decide")
			r := c.Exec(t, "kubevirt-disk", "healthcheck", "--live")
			require.NotZero(t, r.Status, "what the other container's daemon says is not about "+
				"this one")
			require.Contains(t, r.Output, "not a page of the daemon in this container")
			require.Zero(t, first.Stop(t))
			require.Zero(t, c.Exec(t, "kubevirt-disk", "healthcheck").Status,
				"not even if there is no page any more")
		}
	}
	t.Run("base64 wins, and without PORT it is 3260", func(t *testing.T) {
		c := e.NewContainer(t, image,
			append([]string{n.Option(), `--entrypoint=["/entry-point.sh"]`},
				rig.WithEnv("USERNAME=plain", "PASSWORD=a-plain-password",
					"USERNAME_BASE64="+base64.StdEncoding.EncodeToString([]byte(rig.User)),
					"PASSWORD_BASE64="+base64.StdEncoding.EncodeToString([]byte(rig.Password)))...))
		c.Start(t)
		rig.UntilReady(t, c)
		rig.OK(t, "qemu-img", "info", rig.DiskURL(n.Host+":3260", 1))
	})
	t.Run("no image", func(t *testing.T) {
		c := e.NewContainer(t, rig.BaseImage,
			append([]string{"--network=none", asWrapper("3261")},
				rig.WithEnv("USERNAME="+user, "PASSWORD="+password)...))
		c.Start(t)
		require.Equal(t, 1, c.Wait(t))
		require.Contains(t, c.Log(t), "/disk")
	})
}

// The original wrapper's defects 1 to 8, numbered as in the list of its contract, are below. Defect
// 9 is that "readonly" and "serial" get lost in the XML of a domain. It is not a defect of the
// image: package libvirt renders the XML, and tests it.

// TestWrapperDefect1: the wrapper served only one image, the last one by name, even if it was not
// an image.
func TestWrapperDefect1(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img", rig.QEMUISCSI)
	context := t.TempDir()
	for seed, name := range []string{"a.raw", "b.raw"} {
		rig.MakeRawSeed(t, filepath.Join(context, name), 8<<20, uint64(seed))
	}
	require.NoError(t, os.WriteFile(filepath.Join(context, "zz.txt"), []byte("notes\n"), 0o644))

	stray := e.NewContainer(t, e.BuildFrom(t, context, "ADD a.raw b.raw zz.txt /disk/"),
		[]string{"--network=none"})
	stray.Start(t)
	require.Equal(t, 1, stray.Wait(t))
	require.Contains(t, stray.Log(t), "zz.txt")

	n := rig.Namespace(t)
	both := e.NewContainer(t, e.BuildFrom(t, context, "ADD a.raw b.raw /disk/"),
		append(rig.WithEnv(rig.Credential...), n.Option()))
	both.Start(t)
	rig.UntilReady(t, both)
	for i, name := range []string{"a.raw", "b.raw"} {
		rig.Same(t, filepath.Join(context, name), rig.DiskURL(n.Portal(t, both), i+1))
	}
}

// TestWrapperDefect2: the wrapper put the expanded file into /disk. A restart in place converted
// the image again and lost the guest's writes, or took an old file for another image's.
func TestWrapperDefect2(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img", "qemu-io", rig.QEMUISCSI)
	image, _ := oneDisk(t, e)
	n := rig.Namespace(t)
	work := rig.EmptyDir(t)
	options := append(rig.WithEnv(rig.Credential...), n.Option(), asWrapper("3260"),
		"--volume="+work+":/var/lib/kubevirt-disk")
	c := e.NewContainer(t, image, options)
	c.Start(t)
	rig.UntilReady(t, c)
	rig.OK(t, "qemu-io", "-f", "raw", "-c", "write -P 0x42 0 64k", rig.DiskURL(n.Portal(t, c), 1))
	require.Zero(t, c.Stop(t))
	require.Empty(t, changesBelow(t, c, "/disk"))
	c.Start(t)
	rig.UntilReady(t, c)
	rig.OK(t, "qemu-io", "-r", "-f", "raw", "-c", "read -P 0x42 0 64k",
		rig.DiskURL(n.Portal(t, c), 1))
	require.Zero(t, c.Stop(t))

	// Another image with the same name, on the same volume.
	context := t.TempDir()
	source := filepath.Join(t.TempDir(), "source.raw")
	rig.MakeRawSeed(t, source, 16<<20, 7)
	rig.MakeQcow2(t, source, filepath.Join(context, "disk.qcow2"), "", false)
	other := e.NewContainer(t, e.BuildFrom(t, context, "ADD disk.qcow2 /disk"), options)
	other.Start(t)
	rig.UntilReady(t, other)
	rig.Same(t, source, rig.DiskURL(n.Portal(t, other), 1))
}

// changesBelow lists what a container has changed in a directory of its image.
func changesBelow(t *testing.T, c *rig.Container, dir string) (changes []string) {
	t.Helper()
	for line := range strings.Lines(c.E.OK(t, "podman", "diff", c.Name)) {
		if _, path, _ := strings.Cut(strings.TrimSpace(line), " "); path == dir ||
			strings.HasPrefix(path, dir+"/") {
			changes = append(changes, line)
		}
	}
	return changes
}

// TestWrapperDefect3: the wrapper served a raw image in place, so the first write made the union
// file system copy all of it.
func TestWrapperDefect3(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-io", rig.QEMUISCSI)
	context := t.TempDir()
	rig.MakeRaw(t, filepath.Join(context, "disk.raw"), 8<<20)
	n := rig.Namespace(t)
	c := e.NewContainer(t, e.BuildFrom(t, context, "ADD disk.raw /disk"),
		append(rig.WithEnv(rig.Credential...), n.Option()))
	c.Start(t)
	rig.UntilReady(t, c)
	rig.OK(t, "qemu-io", "-f", "raw", "-c", "write -P 0x42 0 64k", "-c", "flush",
		rig.DiskURL(n.Portal(t, c), 1))
	require.Empty(t, changesBelow(t, c, "/disk"))
	require.NotEmpty(t, changesBelow(t, c, "/var/lib/kubevirt-disk"))
}

// TestWrapperDefect4: a username without a password left the target open to everyone.
func TestWrapperDefect4(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img")
	image, _ := oneDisk(t, e)
	for _, half := range [][]string{{"USERNAME=guest"}, {"USERNAME_BASE64=Z3Vlc3Q="},
		{"USERNAME=guest", "PASSWORD="}} {
		c := e.NewContainer(t, image,
			append([]string{"--network=none", asWrapper("3260")}, rig.WithEnv(half...)...))
		c.Start(t)
		require.Equal(t, 2, c.Wait(t))
		require.Contains(t, c.Log(t), "PASSWORD")
		require.NotContains(t, c.Log(t), `"portal"`, "nothing listens")
	}
}

// TestWrapperDefect5: the wrapper accepted logins before it had bound the account to the target,
// and the password was on a command line. Here an initiator without a credential tries from the
// start, so the target answers it first.
func TestWrapperDefect5(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img", "iscsi-ls")
	image, _ := oneDisk(t, e)
	n := rig.Namespace(t)
	options := append(rig.WithEnv("USERNAME="+rig.User, "PASSWORD="+rig.Password), n.Option(),
		asWrapper("3260"))
	c := e.NewContainer(t, image, append(options, rig.Hardened[1:]...))
	address := testtool.Must(net.ResolveTCPAddr("tcp", n.Host+":3260"))(t)
	intrude := func() (refused bool, err error) {
		s, err := targettest.Login(address,
			targettest.LoginOptions{Initiator: "iqn.2026-01.test:early",
				Target: peers.DefaultTarget})
		if err == nil {
			_ = s.Close()
		}
		var refusal *targettest.LoginError
		return errors.As(err, &refusal), err
	}
	answer := make(chan error, 1)
	go func() {
		for {
			if refused, err := intrude(); refused || err == nil || t.Context().Err() != nil {
				answer <- err
				return
			}
		}
	}()
	c.Start(t)
	rig.UntilReady(t, c)
	require.Error(t, <-answer, "an initiator without a credential was let in")
	refused, err := intrude()
	require.True(t, refused, err)
	rig.OKEnv(t, rig.CHAPClient, "iscsi-ls", "iscsi://"+n.Host+":3260")
	line := testtool.Must(os.ReadFile(filepath.Join("/proc", c.PID(t), "cmdline")))(t)
	require.Equal(t, "/entry-point.sh\x003260\x00", string(line))
	require.NotContains(t, c.Log(t), rig.Password)
}

// TestWrapperDefect6: readiness was a fixed sleep, after the whole image had been converted. Here
// the probe succeeds when a login works and the data is right. It does not wait until the image is
// copied.
func TestWrapperDefect6(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img", rig.QEMUISCSI)
	image, source := oneDisk(t, e)
	for _, mode := range []string{"clone", "copy-on-write"} {
		t.Run(mode, func(t *testing.T) {
			n := rig.Namespace(t)
			c := e.NewContainer(t, image,
				append(rig.WithEnv(append([]string{"COPY_MODE=" + mode}, rig.Credential...)...),
					n.Option(),
					asWrapper("3260")))
			c.Start(t)
			rig.UntilReady(t, c)
			rig.Same(t, source, rig.DiskURL(n.Portal(t, c), 1))
			require.Equal(t, "ready\n", c.Exec(t, "cat", "/tmp/healthy").Output)
			if mode == "copy-on-write" {
				require.Contains(t, page(t, "http://"+n.Host+":9260/metrics"),
					`kubevirt_disk_image_copied_bytes{image="disk.qcow2",lun="1"} 0`)
			}
			require.Zero(t, c.Stop(t))
			left := filepath.Join(e.OK(t, "podman", "mount", c.Name), "tmp", "healthy")
			require.NoFileExists(t, left, "it must be gone after the end")
		})
	}
}

// page fetches a page of a daemon.
func page(t *testing.T, url string) string {
	t.Helper()
	answer := testtool.Must(http.Get(url))(t)
	defer answer.Body.Close()
	return string(testtool.Must(io.ReadAll(answer.Body))(t))
}

// TestWrapperDefect7: the wrapper guessed the format and had no limits. An image could exhaust
// memory or disk, or name a file of the host as its backing file.
func TestWrapperDefect7(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img")
	for _, c := range []struct {
		name string
		make func(t *testing.T, path string)
		says string
	}{
		{"a backing file of the host", func(t *testing.T, path string) {
			rig.OK(t, "qemu-img", "create", "-q", "-u", "-f", "qcow2", "-b", "/etc/passwd", "-F",
				"raw",
				path, "1M")
		}, "/etc/passwd"},
		{"a backing file outside the directory", func(t *testing.T, path string) {
			rig.OK(t, "qemu-img", "create", "-q", "-u", "-f", "qcow2", "-b", "../kubevirt-disk",
				"-F",
				"raw", path, "1M")
		}, "../kubevirt-disk"},
		{"a raw file that begins as a qcow2", func(t *testing.T, path string) {
			header := append([]byte("QFI\xfb\x00\x00\x00\x03"), make([]byte, 1<<20-8)...)
			require.NoError(t, os.WriteFile(path, header, 0o644))
		}, "qcow2"},
		{"a table of 4 GiB in a small file", func(t *testing.T, path string) {
			rig.OK(t, "qemu-img", "create", "-q", "-f", "qcow2", path, "1M")
			file := testtool.Must(os.OpenFile(path, os.O_RDWR, 0))(t)
			defer file.Close()
			_, err := file.WriteAt([]byte{0x20, 0, 0, 0}, 36) // l1_size, entries of 8 bytes
			require.NoError(t, err)
		}, "L1"},
		{"more data than the volume has room for", func(t *testing.T, path string) {
			source := filepath.Join(t.TempDir(), "zeros.raw")
			rig.MakeRaw(t, source, 64<<20)
			rig.MakeQcow2(t, source, path, "", true)
		}, "use a larger volume"},
	} {
		t.Run(c.name, func(t *testing.T) {
			context := t.TempDir()
			c.make(t, filepath.Join(context, "disk.qcow2"))
			options := append(rig.WithEnv(rig.Credential...), "--network=none",
				"--tmpfs=/var/lib/kubevirt-disk:size=1m", "--memory=256m")
			s := e.NewContainer(t, e.BuildFrom(t, context, "ADD disk.qcow2 /disk"), options)
			s.Start(t)
			require.Equal(t, 1, s.Wait(t))
			require.Contains(t, s.Log(t), "disk.qcow2")
			require.Contains(t, s.Log(t), c.says)
			require.NotContains(t, s.Log(t), "panic")
		})
	}
}

// TestWrapperDefect8: every wrapper in the world showed the same SCSI identity.
func TestWrapperDefect8(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img", "iscsi-inq")
	image, _ := oneDisk(t, e)
	seen := map[string]bool{}
	for range 2 {
		n := rig.Namespace(t)
		c := e.NewContainer(t, image, append(rig.WithEnv(rig.Credential...), n.Option()))
		c.Start(t)
		rig.UntilReady(t, c)
		url := fmt.Sprintf("iscsi://%s:3260/%s/1", n.Host, peers.DefaultTarget)
		for _, page := range []string{"128", "131"} { // unit serial number, device identification
			text := page + rig.OKEnv(t, rig.CHAPClient, "iscsi-inq", "-e", "1", "-c", page, url)
			require.False(t, seen[text], "two containers of one image show the same:\n%s", text)
			seen[text] = true
		}
	}
}
