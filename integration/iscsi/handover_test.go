package iscsi

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/target/targettest"
)

// TestHandoverOfALUN goes through a live migration with two initiators that are logged in at the
// same time.
func TestHandoverOfALUN(t *testing.T) {
	t.Parallel()
	rig.Need(t)
	state := t.TempDir()
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 1<<20), StateDir: state})
	const first, second = "iqn.2026-01.test:source", "iqn.2026-01.test:destination"
	from, to := rig.LoginTo(t, d, first), rig.LoginTo(t, d, second)
	write := func(b byte) []byte { return rig.Block(7, b) }
	require.Zero(t, rig.Do(t, from, targettest.Write10(1, 7, write(1))).Status)
	require.Equal(t, targettest.StatusReservationConflict, rig.Do(t, to,
		rig.ReadBlock(1, 7)).Status)

	require.Contains(t, rig.Handover(t, state, 0, "--to="+second, "--for=5m"), second)
	require.Equal(t, write(1), rig.Do(t, to, rig.ReadBlock(1, 7)).Data,
		"both must be able to use it")
	require.Zero(t, rig.Do(t, from, targettest.Write10(1, 7, write(2))).Status)
	require.Equal(t, write(2), rig.Do(t, to, rig.ReadBlock(1, 7)).Data)

	require.Contains(t, rig.Handover(t, state, 0, "--finish"),
		"the former one, "+first+", is fenced")
	d.Until("the log says who is fenced",
		func() bool { return strings.Contains(d.Output(), first+", is fenced") })
	require.Equal(t, targettest.StatusReservationConflict,
		rig.Do(t, from, targettest.Write10(1, 7, write(3))).Status, "the first one must be fenced")
	require.Equal(t, targettest.StatusReservationConflict, rig.Do(t, from,
		rig.ReadBlock(1, 7)).Status)
	require.Zero(t, rig.Do(t, to, targettest.Write10(1, 7, write(4))).Status)
	require.Equal(t, write(4), rig.Do(t, to, rig.ReadBlock(1, 7)).Data)

	// The time ends and the second initiator has not come: the LUN stays with its owner.
	rig.Handover(t, state, 0, "--to=iqn.2026-01.test:never", "--for=1ms")
	d.Until("the time is over",
		func() bool { return strings.Contains(d.Output(), "the LUN stays with its owner") })
	require.Zero(t, rig.Do(t, to, targettest.Write10(1, 7, write(5))).Status)

	// A refused --finish does not change the time, so that the LUN does not stay open for good. On
	// a slow machine the time may end before --finish comes; then try again with more time.
	for open := time.Second; ; open *= 2 {
		rig.Handover(t, state, 0, "--to=iqn.2026-01.test:never", "--for="+open.String())
		ended := strings.Count(d.Output(), "and the LUN stays with its owner")
		out := rig.Handover(t, state, 1, "--finish")
		if strings.Contains(out, "open it first") {
			continue
		}
		require.Contains(t, out, "not logged in")
		d.Until("that time is over too", func() bool {
			return strings.Count(d.Output(), "and the LUN stays with its owner") > ended
		})
		break
	}

	// The time ends and the second initiator is there: the first one is fenced.
	rig.Handover(t, state, 0, "--to="+first, "--for=1ms")
	d.Until("the former owner is fenced",
		func() bool { return strings.Contains(d.Output(), "the former owner is fenced") })
	require.Equal(t, targettest.StatusReservationConflict, rig.Do(t, to,
		rig.ReadBlock(1, 7)).Status)
	require.Equal(t, write(5), rig.Do(t, from, rig.ReadBlock(1, 7)).Data)
}

// TestHandoverSurvivesARestart ends the daemon after a handover and during one. The first initiator
// to log in afterwards may be the former owner, which reconnects by itself. It must not get more
// than it had.
func TestHandoverSurvivesARestart(t *testing.T) {
	t.Parallel()
	rig.Need(t)
	const first, second = "iqn.2026-01.test:source", "iqn.2026-01.test:destination"
	for name, persistent := range map[string]bool{"ephemeral": false, "persistent": true} {
		t.Run(name, func(t *testing.T) {
			c := rig.Config{DiskDir: rig.DiskDir(t, 1<<20), StateDir: t.TempDir()}
			if persistent {
				c.Env = map[string]string{"PERSISTENT_DIR": t.TempDir()}
			}
			write := func(n *targettest.Session, b byte) any {
				return rig.Do(t, n, targettest.Write10(1, 7, rig.Block(7, b))).Status
			}
			d := rig.Start(t, c)
			require.Zero(t, write(rig.LoginTo(t, d, first), 1))
			to := rig.LoginTo(t, d, second)
			rig.Handover(t, c.StateDir, 0, "--to="+second)
			rig.Handover(t, c.StateDir, 0, "--finish")
			require.Zero(t, write(to, 2))
			d.Crash()

			d = rig.Start(t, c)
			from := rig.LoginTo(t, d, first)
			require.Equal(t, targettest.StatusReservationConflict, write(from, 3),
				"although it is back first")
			require.Equal(t, targettest.StatusReservationConflict,
				rig.Do(t, from, rig.ReadBlock(1, 7)).Status)
			require.Contains(t, d.Get("/status"), first, "who is fenced")
			to = rig.LoginTo(t, d, second)
			require.Equal(t, rig.Block(7, 2), rig.Do(t, to, rig.ReadBlock(1, 7)).Data)
			require.Zero(t, write(to, 4))

			// And back: this time the daemon ends during the handover.
			rig.Handover(t, c.StateDir, 0, "--to="+first, "--for=1h")
			d.Crash()
			d = rig.Start(t, c)
			require.Contains(t, d.Output(), "still open for a handover")
			from, to = rig.LoginTo(t, d, first), rig.LoginTo(t, d, second)
			require.Zero(t, write(from, 5))
			require.Zero(t, write(to, 6))
			rig.Handover(t, c.StateDir, 0, "--finish")
			d.Stop()
			d = rig.Start(t, c)
			require.Equal(t, targettest.StatusReservationConflict, write(rig.LoginTo(t, d, second),
				7))
			from = rig.LoginTo(t, d, first)
			require.Equal(t, rig.Block(7, 6), rig.Do(t, from, rig.ReadBlock(1, 7)).Data)
			require.Zero(t, write(from, 8))
			d.Stop()

			// If the record cannot be read, the daemon must not guess.
			dir := c.StateDir
			if persistent {
				dir = c.Env["PERSISTENT_DIR"]
			}
			var kept string
			require.NoError(t,
				filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
					if err == nil && e.Name() == "handover" {
						kept = path
					}
					return err
				}))
			require.NoError(t, os.Truncate(kept, 20))
			_, err := rig.TryStart(t, c)
			require.ErrorContains(t, err, kept)
			require.ErrorContains(t, err, "unknown who may write")
			require.NoError(t, os.Remove(kept))
			d = rig.Start(t, c)
			require.Zero(t, write(rig.LoginTo(t, d, second), 9))
		})
	}
}

// TestHandoverOnAFullVolume: a handover works even if the guest has filled its volume, and the
// former owner stays fenced.
func TestHandoverOnAFullVolume(t *testing.T) {
	t.Parallel()
	rig.Need(t)
	const first, second = "iqn.2026-01.test:source", "iqn.2026-01.test:destination"
	volume := t.TempDir()
	rig.MountTmpfs(t, volume, "8m")
	c := rig.Config{DiskDir: rig.DiskDir(t, 1<<20), StateDir: t.TempDir(),
		Env: map[string]string{"PERSISTENT_DIR": volume}}
	write := func(n *targettest.Session, b byte) any {
		return rig.Do(t, n, targettest.Write10(1, 7, rig.Block(7, b))).Status
	}
	d := rig.Start(t, c)
	d.Until("the disk is complete", func() bool { return d.Complete(1) })
	require.Zero(t, write(rig.LoginTo(t, d, first), 1))
	fill(t, filepath.Join(volume, "filler"))
	names := []string{first, second}
	for i := range 4 {
		to := rig.LoginTo(t, d, names[(i+1)%2])
		for _, args := range [][]string{{"--to=" + names[(i+1)%2]}, {"--finish"}} {
			rig.Handover(t, c.StateDir, 0, args...)
		}
		require.Zero(t, write(to, 2))
		d.Crash()
		d = rig.Start(t, c)
		require.Equal(t, targettest.StatusReservationConflict, write(rig.LoginTo(t, d, names[i%2]),
			3))
	}
}
