package main

import (
	"context"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/hook/hookpb"
)

// arriving is a machine that is on its way to this pod, and says nothing.
const arriving = `{"status": {"migrationState": {"targetPod": "p", "targetNode": "n"}}}`

// requireRefused checks that QEMU is told the reason when it asks for a disk.
func (s *sidecar) requireRefused(export, words string) {
	s.t.Helper()
	testtool.Need(s.t, "qemu-img")
	cmd := exec.Command("qemu-img", "info", "nbd+unix:///"+export+"?socket=nbd.sock")
	cmd.Dir = s.hooks + "/disk" // the address of a socket is short
	out, err := cmd.CombinedOutput()
	require.Error(s.t, err)
	require.Contains(s.t, string(out), words)
}

// TestHookRefusesForGood: KubeVirt asks where a machine arrives, and tries again without asking.
// What it was told then holds: QEMU does not get the disk of the wrong pod, also when the launcher
// asks for another machine, or the container is started again.
func TestHookRefusesForGood(t *testing.T) {
	const words = `"fedora.raw" is in the pod that the machine runs in`
	for name, vmi := range map[string]string{"a disk that stays": arriving,
		"a wrong annotation": `{"metadata": {"annotations": {"disk.kubevirt.io/bus": "ide"}}, ` +
			arriving[1:],
		"a machine that is not understood": `{"status": {"migrationState": "moving"}}`} {
		t.Run(name, func(t *testing.T) {
			s := newSidecar(t)
			p := s.start("serve")
			l := s.launcher(p)
			_, err := l.define()
			require.NoError(t, err)
			require.NotEmpty(t, s.content("fedora.raw"))
			_, refusal := l.defineFor(vmi)
			require.Error(t, refusal)
			if vmi == arriving {
				require.ErrorContains(t, refusal, words)
				s.requireRefused("fedora.raw", words)
			}
			s.requireRefused("1", "Denied by server")
			_, err = l.define()
			require.Equal(t, refusal.Error(), err.Error(), "it is final")
			require.NoError(t, p.cmd.Process.Kill())
			p.status()
			p = s.start("serve")
			p.untilLauncherCan()
			_, err = s.launcher(p).define()
			require.Equal(t, refusal.Error(), err.Error(), "it is the pod's")
			s.requireRefused("fedora.raw", "Denied by server")
			require.Equal(t, exitDone, p.terminate())
		})
	}
}

// TestHookRefusesAStart: a machine that cannot be started as its annotations say may be mended, and
// is asked for again.
func TestHookRefusesAStart(t *testing.T) {
	s := newSidecar(t)
	p := s.start("serve")
	l := s.launcher(p)
	_, err := l.defineFor(`{"metadata": {"annotations": {"disk.kubevirt.io/bus": "ide"}}}`)
	require.ErrorContains(t, err, `"ide"`)
	_, err = l.define()
	require.NoError(t, err)
	require.NotEmpty(t, s.content("fedora.raw"))
	require.Equal(t, exitDone, p.terminate())
}

// TestHookThatCannotInherit: the disk of another server stays another machine's, if the server
// cannot be told that this one arrives. The launcher gives up, and QEMU must not get it.
func TestHookThatCannotInherit(t *testing.T) {
	s := newSidecar(t)
	at := newPlace(t, "far.raw")
	server := at.serve(t, "NBD_LISTEN=127.0.0.1:0")
	portal, _ := server.logged("NBD portal", "address").(string)
	p := s.start("serve", "--disk-dir=/run/claim", "--disk=nbd://"+portal+"/far.raw")
	l := s.launcher(p)
	_, err := l.define()
	require.NoError(t, err)
	require.NoError(t, server.cmd.Process.Kill())
	server.status()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	in := &hookpb.DomainParams{DomainXml: []byte(`<domain/>`), Vmi: []byte(arriving)}
	require.Error(t, l.Invoke(ctx, "/kubevirt.hooks.v1alpha3.Callbacks/OnDefineDomain", in,
		&hookpb.DomainResult{}))
	p.until("it refuses the disks", func() bool {
		return p.logged("the disks are refused to all clients from now on", "error") != nil
	})
	s.requireRefused("far.raw", "cannot follow the machine")
	require.Equal(t, exitDone, p.terminate())
}
