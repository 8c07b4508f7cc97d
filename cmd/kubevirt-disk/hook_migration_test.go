package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubevirt/hookpb"
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
			p, l := s.serve()
			require.NoError(t, testtool.Err(l.define()))
			require.NotEmpty(t, s.content("fedora.raw"))
			_, refusal := l.defineFor(vmi)
			require.Error(t, refusal)
			if vmi == arriving {
				require.ErrorContains(t, refusal, words)
				s.requireRefused("fedora.raw", words)
			}
			s.requireRefused("1", "Denied by server")
			_, err := l.define()
			require.Equal(t, refusal.Error(), err.Error(), "it is final")
			p.kill()
			p = s.again()
			_, err = s.launcher(p).define()
			require.Equal(t, refusal.Error(), err.Error(), "it is the pod's")
			s.requireRefused("fedora.raw", "Denied by server")
			require.Equal(t, exitDone, p.terminate())
		})
	}
}

// kill ends a sidecar at once.
func (p *process) kill() {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Kill())
	p.status()
}

// notAsked is what whoever wants a disk is told while the launcher has none.
const notAsked = "KubeVirt has not asked this hook"

// TestHookIsClosed: nobody has a disk before the launcher has, at whatever socket. KubeVirt also
// starts QEMU if another hook has failed before this one was asked. A machine that cannot be
// started as its annotations say may be mended, and is asked for again. A container that is started
// again under a machine that has its disk serves it without being asked.
func TestHookIsClosed(t *testing.T) {
	s := newSidecar(t)
	more := "--nbd=unix:/run/kubevirt-hooks/disk/more.sock"
	p := s.start("serve", more)
	s.launcher(p)
	s.requireRefused("fedora.raw", notAsked)
	testtool.Eventually(t, func() bool { return p.logged("a client is refused", "error") != nil },
		"the log says so")
	require.NoError(t, os.Rename(s.nbd(), s.nbd()+".own"))
	require.NoError(t, os.Rename(filepath.Join(s.hooks, "disk", "more.sock"), s.nbd()))
	s.requireRefused("fedora.raw", notAsked)
	p.kill()

	p = s.again()
	s.requireRefused("1", notAsked)
	_, err := s.launcher(p).defineFor(`{"metadata": {"annotations": {"disk.kubevirt.io/bus": "ide"}}}`)
	require.ErrorContains(t, err, `"ide"`)
	s.requireRefused("1", `"ide"`)
	require.NoError(t, testtool.Err(s.launcher(p).define()))
	require.NotEmpty(t, s.content("fedora.raw"))
	_, err = s.launcher(p).defineFor(`{"metadata": {"annotations": {"disk.kubevirt.io/bus": "ide"}}}`)
	require.Error(t, err)
	require.NotEmpty(t, s.content("fedora.raw"), "the machine that is here keeps it")
	p.kill()

	p = s.again()
	require.NotEmpty(t, s.content("fedora.raw"))
	require.Equal(t, exitDone, p.terminate())
}

// TestHookCannotKeepItsAnswer: a disk that would be refused after a restart is not given, and one
// that was refused is not given after a restart.
func TestHookCannotKeepItsAnswer(t *testing.T) {
	s := newSidecar(t)
	p, l := s.serve()
	inTheWay := s.nbd() + ".answer.partial"
	require.NoError(t, os.Mkdir(inTheWay, 0o700))
	_, err := l.define()
	require.ErrorContains(t, err, "that the machine has the disks cannot be kept")
	s.requireRefused("1", "cannot be kept")
	require.NoError(t, os.Remove(inTheWay))
	require.NoError(t, testtool.Err(l.define()))
	require.NoError(t, os.Mkdir(inTheWay, 0o700))
	require.Error(t, testtool.Err(l.defineFor(arriving)))
	p.kill()
	require.NoError(t, os.Remove(inTheWay))

	p = s.again()
	s.requireRefused("1", notAsked)
	p.kill()
	require.NoError(t, os.WriteFile(s.nbd()+".answer", []byte("given away"), 0o600))
	require.NoError(t, os.Chown(s.nbd()+".answer", 107, 107))
	p = s.start("serve")
	p.until("the launcher is told", func() bool {
		return p.logged("the machine cannot start, and KubeVirt's launcher is told why",
			"error") != nil
	})
	_, err = s.launcher(p).define()
	require.ErrorContains(t, err, "whether the disks of this pod are refused")
	require.NotZero(t, p.terminate())
}

// TestHookByHand: a person serves the disk of a killed hook at its socket, from a container that is
// added to the pod, and not that of a hook that has refused.
func TestHookByHand(t *testing.T) {
	s := newSidecar(t)
	s.mountClaim()
	p, l := s.serve()
	require.NoError(t, testtool.Err(l.defineFor(withClaim("/run/claim"))))
	p.kill()
	p = s.again()
	require.NotEmpty(t, s.content("fedora.raw"), "it was asked before")
	p.kill()

	again := *s
	again.mounted, again.container = "/run/hooks", ""
	serve := func() *process {
		p := again.start("serve", "--iscsi=false", "--metrics-listen=", "--ready-file=",
			"--persistent-dir=/run/claim", "--nbd=unix:/run/hooks/disk/nbd.sock")
		p.until("it serves", func() bool { return p.logged("ready", "nbd_portals") != nil })
		return p
	}
	p = serve()
	require.NotEmpty(t, s.content("fedora.raw"))
	require.Equal(t, exitDone, p.terminate())

	p = s.again()
	_, refusal := s.launcher(p).defineFor(arriving)
	require.Error(t, refusal)
	p.kill()
	p = serve()
	s.requireRefused("fedora.raw", "is in the pod that the machine runs in")
	require.Equal(t, exitDone, p.terminate())
}

// TestHookThatCannotInherit: the disk of another server stays another machine's, if the server
// cannot be told that this one arrives. The launcher gives up, and QEMU must not get it.
func TestHookThatCannotInherit(t *testing.T) {
	s := newSidecar(t)
	at := newPlace(t, "far.raw")
	server := at.serve(t, "NBD_LISTEN=127.0.0.1:0")
	portal, _ := server.logged("NBD portal", "address").(string)
	p, l := s.serve("--disk-dir=/run/claim", "--disk=nbd://"+portal+"/far.raw")
	require.NoError(t, testtool.Err(l.define()))
	server.kill()
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
