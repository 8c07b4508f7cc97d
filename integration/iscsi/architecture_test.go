package iscsi

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/targettest"
)

// TestOtherArchitecture runs the image's other binary in QEMU's user mode. It reads and writes
// disks of compressed images, kills the daemon and reads them again, logs in with CHAP and both
// digests, and converts an image.
func TestOtherArchitecture(t *testing.T) {
	t.Parallel()
	rig.AgainNightly(t)
	other, supported := map[string]struct {
		name,
		emulator string
	}{"amd64": {"arm64", "qemu-aarch64"}, "arm64": {"amd64", "qemu-x86_64"}}[runtime.GOARCH]
	if !supported {
		t.Skip("the image is not built for this machine")
	}
	rig.Need(t, "qemu-img", "qemu-io", rig.QEMUISCSI, other.emulator)
	program := emulated(t, other.name, other.emulator)
	require.Contains(t, rig.OK(t, program, "version"), "linux/"+other.name)
	dir, source, names := modeImages(t)
	for _, c := range []rig.Config{
		{Env: map[string]string{"COPY_MODE": "clone"}},
		{Env: map[string]string{"COPY_MODE": "copy-on-write", "PERSISTENT_DIR": t.TempDir()}},
	} {
		t.Run(c.Env["COPY_MODE"], func(t *testing.T) {
			c.Binary, c.DiskDir, c.StateDir = program, dir, t.TempDir()
			changeAndKill(t, c, source, names).Stop()
		})
	}
	t.Run("CHAP and digests", func(t *testing.T) {
		d := rig.Start(t, rig.Config{Binary: program, DiskDir: rig.DiskDir(t, 8<<20),
			Env: rig.CHAPEnv})
		addr := testtool.Must(net.ResolveTCPAddr("tcp", d.Portals[0]))(t)
		for _, algorithm := range []chap.Algorithm{chap.MD5, chap.SHA1, chap.SHA256,
			chap.SHA3_256} {
			s := targettest.MustLogin(t, addr,
				targettest.LoginOptions{HeaderDigest: true, DataDigest: true,
					CHAP: &targettest.CHAP{
						Offer: strconv.Itoa(int(algorithm)), Username: rig.User,
						Password: rig.Password}}, 1)
			data := bytes.Repeat([]byte{byte(algorithm)}, 64<<10)
			require.True(t, rig.Do(t, s, targettest.Write10(1, 0, data)).Good())
			require.Equal(t, data, rig.Do(t, s, targettest.Read10(1, 0, 128)).Data)
			rig.Logout(t, s)
		}
	})
	t.Run("convert", func(t *testing.T) {
		for _, name := range names {
			raw := filepath.Join(t.TempDir(), "converted.raw")
			rig.OK(t, program, "convert", filepath.Join(dir, name), raw)
			rig.Same(t, source, raw)
		}
	})
}

// emulated makes the binary of the image for another architecture. It returns a program for this
// machine that runs it.
func emulated(t *testing.T, arch, emulator string) string {
	t.Helper()
	built := "bin/kubevirt-disk-linux-" + arch
	dir := t.TempDir()
	path, program := filepath.Join(dir, arch), filepath.Join(dir, "kubevirt-disk")
	release := testtool.Must(rig.HoldBin())(t)
	defer release()
	cmd := exec.Command("make", "--no-print-directory", built)
	cmd.Dir = "../.."
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	rig.OK(t, "cp", filepath.Join("..", "..", built), path)
	require.NoError(t, os.WriteFile(program,
		fmt.Appendf(nil, "#!/bin/sh\nexec %s '%s' \"$@\"\n", emulator, path), 0o755))
	return program
}
