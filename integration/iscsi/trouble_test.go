package iscsi

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

// inTrouble waits until a person sees that the only disk of a daemon is in a state, wherever he
// looks: /status, the page, the log, /metrics and the probes, which are 200 all the same.
func inTrouble(d *rig.Daemon, state status.DiskState, kind, reason string) {
	d.T.Helper()
	d.Until(string(state), func() bool { return d.Status().LUNs[0].State == state })
	lun := d.Status().LUNs[0]
	require.Equal(d.T, kind, lun.Kind)
	require.Contains(d.T, lun.Reason, reason)
	require.NotEmpty(d.T, lun.WhatToDo)
	require.NotZero(d.T, lun.Since)
	require.NotZero(d.T, lun.Requests)
	page := d.Get("/")
	require.Contains(d.T, page, "<title id=\"title\">1 of 1 disk: "+state.Words()+" (LUN 1)<")
	require.Contains(d.T, page, reason)
	series := d.Get("/metrics")
	require.Contains(d.T, series, fmt.Sprintf(`lun_state{lun="1",state="%s"} 1`, state))
	require.Contains(d.T, series, fmt.Sprintf(`lun_trouble{kind="%s",lun="1"}`, kind))
	for _, probe := range []string{"/readyz", "/healthz"} {
		res := testtool.Must(http.Get("http://" + d.Metrics + probe))(d.T)
		require.NoError(d.T, res.Body.Close())
		require.Equal(d.T, http.StatusOK, res.StatusCode, probe)
	}
	require.Contains(d.T, d.Get("/readyz"), reason)
	d.UntilSaid("a disk is in trouble")
}

// over waits until everybody is told that the trouble is over. The log told of it once each.
func over(d *rig.Daemon) {
	d.T.Helper()
	d.UntilSaid("the trouble of a disk is over")
	require.Equal(d.T, status.DiskReady, d.Status().LUNs[0].State)
	require.Equal(d.T, "ok\n", d.Get("/readyz"))
	require.Contains(d.T, d.Get("/metrics"), `lun_state{lun="1",state="ready"} 1`)
	for _, said := range []string{"a disk is in trouble", "the trouble of a disk is over"} {
		require.Equal(d.T, 1, strings.Count(d.Output(), said), "%s\n%s", said, d.Output())
	}
	for _, entry := range d.Log() {
		if entry["msg"] == "the trouble of a disk is over" {
			require.EqualValues(d.T, 1, entry["lun"])
			require.NotEmpty(d.T, entry["image"])
			require.NotZero(d.T, entry["after"])
		}
	}
}

// TestRegistryHangs: a guest's read waits for a registry that takes connections and says nothing.
func TestRegistryHangs(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img", "qemu-io")
	raw, w := rig.NewLargeDisk(t), rig.NewWatchedRegistry(t)
	rig.Push(t, w.Address, raw)
	state := t.TempDir()
	d := rig.Start(t, rig.Config{DiskDir: t.TempDir(), StateDir: state, Args: []string{
		"--image=" + w.Proxy + "/vm/fedora:42", "--insecure-registry=" + w.Proxy,
		"--copy-mode=copy-on-write"}})
	w.Hold.Lock()
	read := make(chan rig.Result, 1)
	go func() {
		read <- rig.Client(t, nil, "qemu-io", "-r", "-f", "raw", "-c", "read 30M 64k", d.URL(1))
	}()
	inTrouble(d, status.DiskWaiting, status.TroubleRegistry, "for the registry of "+w.Proxy)
	sessions := rig.MustRun(t, nil, "sessions", "--work-dir="+filepath.Join(state, "work")).Output
	require.Contains(t, sessions, "1 for the registry of "+w.Proxy+"/vm/fedora:42 since ")
	require.Contains(t, rig.LastLines(d.Output(), 20), `"peers":["iqn.`)
	w.Hold.Unlock()
	require.Zero(t, (<-read).Status)
	over(d)
}

// TestServerHangs: the server of a disk is stopped while a client reads.
func TestServerHangs(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-io")
	dir := t.TempDir()
	server := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 8<<20),
		Args: []string{"--nbd=unix:" + filepath.Join(dir, "server")}})
	d := rig.Start(t, rig.Config{DiskDir: t.TempDir(), Args: []string{
		"--disk=nbd+unix:///disk.raw?socket=" + filepath.Join(dir, "server"),
		"--nbd=unix:" + filepath.Join(dir, "nbd")}})
	require.NoError(t, server.Signal(syscall.SIGSTOP))
	// On a busy machine its threads go on for a while.
	require.NoError(t, unix.Waitid(unix.P_PID, server.PID(), nil,
		unix.WSTOPPED|unix.WEXITED|unix.WNOWAIT, nil))
	read := make(chan rig.Result, 1)
	go func() {
		read <- rig.Client(t, nil, "qemu-io", "-r", "-f", "raw", "-c", "read 1M 64k",
			"nbd+unix:///disk.raw?socket="+filepath.Join(dir, "nbd"))
	}()
	inTrouble(d, status.DiskWaiting, status.TroubleServer, "for the NBD server unix:"+dir)
	require.NoError(t, server.Signal(syscall.SIGCONT))
	require.Zero(t, (<-read).Status)
	over(d)
}

// TestDiskIsFull: a disk that is complete has no space for what the guest writes, until somebody
// makes some.
func TestDiskIsFull(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-io")
	images, storage, other := t.TempDir(), t.TempDir(), t.TempDir()
	rig.MountTmpfs(t, storage, "16m")
	image := filepath.Join(images, "disk.raw")
	require.NoError(t, os.WriteFile(image, nil, 0o644))
	require.NoError(t, os.Truncate(image, 1<<30))
	d := rig.Start(t, rig.Config{DiskDir: images, StateDir: other,
		Env: map[string]string{"WORK_DIR": filepath.Join(storage, "work")}})
	write := func(what string) rig.Result {
		return rig.Client(t, nil, "qemu-io", "-f", "raw", "-c", what, d.URL(1))
	}
	require.Contains(t, write("write 8M 16M").Output, "No space left")
	d.UntilFree()
	inTrouble(d, status.DiskNoSpace, status.TroubleNoSpace, "")
	require.Contains(t, d.Get("/metrics"), `waits_for_space{image="disk.raw",lun="1"} 1`)
	require.Zero(t, write("discard 0 64M").Status)
	d.UntilFree()
	require.Zero(t, write("write 1M 64k").Status)
	over(d)
}
