package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestHookPersists: a claim is found, whatever the annotation calls the place where it is mounted,
// and the next machine has the disk that this one leaves.
func TestHookPersists(t *testing.T) {
	s := newSidecar(t)
	s.mountClaim()
	serial := ""
	for range 2 {
		p, l := s.serve()
		domain := testtool.Must(l.define())(t)
		if serial != "" {
			require.Equal(t, serial, domain.Devices.Disks[0].Serial)
		}
		serial = domain.Devices.Disks[0].Serial
		l.shutdown()
		require.Equal(t, exitDone, p.status())
		require.FileExists(t, filepath.Join(s.claim, "disk.img"))
	}
}

// TestHookWithTwoClaims: nobody can tell which one is for the disks, unless a setting says so.
func TestHookWithTwoClaims(t *testing.T) {
	s := newSidecar(t)
	s.mountClaim()
	s.mountSecond()
	p, l := s.serve()
	_, err := l.define()
	require.ErrorContains(t, err, "/run/claim, /run/second")
	require.ErrorContains(t, err, "--persistent-dir")
	l.shutdown()
	require.Equal(t, exitUsage, p.status())

	p, l = s.serve("--persistent-dir=/run/second")
	l.shutdown()
	require.Equal(t, exitDone, p.status())
	require.FileExists(t, filepath.Join(s.second, "disk.img"))
	require.NoFileExists(t, filepath.Join(s.claim, "disk.img"))
}

// withClaim is a machine whose hook sidecar has a claim there; "": it has none.
func withClaim(dir string) string {
	pvc := ""
	if dir != "" {
		pvc = `, \"pvc\": {\"name\": \"data\", \"volumePath\": \"` + dir + `\"}`
	}
	return `{"metadata": {"annotations": {"hooks.kubevirt.io/hookSidecars": ` +
		`"[{\"image\": \"r.example/vm:1\"` + pvc + `}]"}}}`
}

// mountSecond mounts one more volume that can be written, as an admission webhook does.
func (s *sidecar) mountSecond() {
	s.t.Helper()
	s.second = s.t.TempDir()
	require.NoError(s.t, os.Chown(s.second, 107, 107))
}

// TestHookBelievesTheMachine: the machine says where the claim is, whatever else is mounted. A
// container that is started again, and is not asked, still knows.
func TestHookBelievesTheMachine(t *testing.T) {
	s := newSidecar(t)
	s.mountClaim()
	s.mountSecond()
	p := s.start("serve")
	p.until("it waits for the launcher", func() bool {
		return p.logged("the disks are opened when KubeVirt's launcher says where the claim of "+
			"this container is", "volumes") != nil
	})
	domain := testtool.Must(s.launcher(p).defineFor(withClaim("/run/claim/")))(t)
	serial := domain.Devices.Disks[0].Serial
	require.FileExists(t, filepath.Join(s.claim, "disk.img"))
	require.Empty(t, testtool.Must(os.ReadDir(s.second))(t), "the other volume is not ours")
	p.kill()

	p = s.again()
	domain = testtool.Must(s.launcher(p).defineFor(withClaim("/run/claim")))(t)
	require.Equal(t, serial, domain.Devices.Disks[0].Serial)
	_, err := s.launcher(p).defineFor(withClaim("/run/second"))
	require.ErrorContains(t, err, `the claim of this hook sidecar at "/run/second"`)
	_, err = s.launcher(p).defineFor(withClaim(""))
	require.ErrorContains(t, err, "no claim for this hook sidecar")
	require.Equal(t, exitDone, p.terminate())
}

// TestHookWithoutAClaim: a volume that is none of the machine's is left alone, and the disk ends
// with the pod.
func TestHookWithoutAClaim(t *testing.T) {
	s := newSidecar(t)
	s.mountSecond()
	p, l := s.serve()
	require.NoError(t, testtool.Err(l.defineFor(withClaim(""))))
	require.Empty(t, testtool.Must(os.ReadDir(s.second))(t))
	require.DirExists(t, filepath.Join(s.hooks, "disk", "work"))
	l.shutdown()
	require.Equal(t, exitDone, p.status())
}

// TestHookWithAClaimElsewhere: what the machine says and what is mounted are not the same. A disk
// in the wrong place would be lost, or another one.
func TestHookWithAClaimElsewhere(t *testing.T) {
	s := newSidecar(t)
	p, l := s.serve()
	_, err := l.defineFor(withClaim("/run/claim"))
	require.ErrorContains(t, err, `the claim of this hook sidecar at "/run/claim"`)
	require.ErrorContains(t, err, "mount the claim")
	l.shutdown()
	require.Equal(t, exitDone, p.status())

	s.mountSecond()
	p, l = s.serve()
	_, err = l.defineFor(withClaim("/run/claim"))
	require.ErrorContains(t, err, `at "/run/claim", and no volume that can be written is mounted `+
		"there, only at /run/second")
	l.shutdown()
	require.Equal(t, exitUsage, p.status())
	require.NoFileExists(t, filepath.Join(s.second, "disk.img"))

	p, l = s.serve("--persistent-dir=/run/second")
	_, err = l.defineFor(withClaim("/run/claim"))
	require.NoError(t, err, "a person has said where")
	l.shutdown()
	require.Equal(t, exitDone, p.status())
}

// TestHookIsNotAsked: a machine that ends before the launcher has asked leaves nothing to do,
// whether the disks are open by then or wait for a word about their claim.
func TestHookIsNotAsked(t *testing.T) {
	s := newSidecar(t)
	for _, mount := range []func(){func() {}, s.mountClaim} {
		mount()
		p, l := s.serve()
		l.shutdown()
		require.Equal(t, exitDone, p.status())
		p, _ = s.serve()
		require.Equal(t, exitDone, p.terminate())
		require.NoFileExists(t, s.socket())
	}
	require.NoFileExists(t, filepath.Join(s.claim, "disk.img"))
}

// TestHookServesASnapshot: a snapshot that somebody reads is no disk of the machine, which may ask
// for its disks again meanwhile.
func TestHookServesASnapshot(t *testing.T) {
	s := newSidecar(t)
	s.mountClaim()
	p, l := s.serve("--copy-mode=copy-on-write")
	first := testtool.Must(l.define())(t)
	for _, args := range [][]string{{"snapshot", "create", "1", "s"},
		{"snapshot", "serve", "1", "s"}} {
		asked := s.start(args...)
		require.Equal(t, exitDone, asked.status(), asked.stderr.String())
	}
	require.Equal(t, first, testtool.Must(l.define())(t))
	require.Equal(t, exitDone, p.terminate())
}
