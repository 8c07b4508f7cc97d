package main

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/target/targettest"
)

const wrapperTarget = "iqn.2017-01.io.kubevirt:wrapper"

// portal is the address that a daemon listens on.
func (p *process) portal() net.Addr {
	p.t.Helper()
	addr, err := netip.ParseAddrPort(p.logged("portal", "address").(string))
	require.NoError(p.t, err)
	return net.TCPAddrFromAddrPort(addr)
}

// login logs in to a daemon without CHAP.
func (p *process) login(initiator string, luns ...uint16) *targettest.Session {
	p.t.Helper()
	return targettest.MustLogin(p.t, p.portal(),
		targettest.LoginOptions{Initiator: initiator, Target: wrapperTarget}, luns...)
}

// TestSettingsReachInitiators checks, by SCSI commands only, what an initiator sees of the
// settings. So no setting is read and then forgotten.
func TestSettingsReachInitiators(t *testing.T) {
	const first, second = "iqn.2020-01.test:first", "iqn.2020-01.test:second"
	l := newPlace(t, "a.raw", "b.raw", "c.raw", "d.raw")
	p := l.serve(t, "MAX_SESSIONS=2", settings.EnvConfig+"="+yamlFile(t, `
disks:
  a.raw: {access-mode: write-shared}
  b.raw: {read-only: true, serial: of-the-user}
  c.raw: {size: 1Mi}
  d.raw: {block-size: 4096}
`))
	one, two := p.login(first, 1, 2, 3, 4), p.login(second, 1, 2, 3)

	block := make([]byte, 512)
	for _, s := range []*targettest.Session{one, two, one} {
		s.MustGood(t, targettest.Write10(1, 0, block))
	}
	one.MustFail(t, targettest.Write10(2, 0, block), "07/27/00")
	protected := func(lun uint16) byte { // the bit WP of the mode parameter header
		return one.MustGood(t, targettest.Command{LUN: lun, CDB: []byte{0x1a, 0, 0x3f, 0, 255, 0},
			Read: 255}).Data[2] >> 7
	}
	require.Equal(t, []byte{0, 1, 0}, []byte{protected(1), protected(2), protected(3)})
	serial := targettest.Inquiry(2, 255)
	serial.CDB[1], serial.CDB[2] = 1, 0x80
	require.Contains(t, string(one.MustGood(t, serial).Data), "of-the-user")
	one.MustGood(t, targettest.Write10(3, 1<<20/512-1, block))
	two.MustFail(t, targettest.Write10(3, 0, block), "status 0x18")

	require.Equal(t, []byte{0, 0, 0, 3, 0, 0, 0x10, 0},
		one.MustGood(t, targettest.ReadCapacity10(4)).Data, "four blocks of 4096 bytes")

	_, err := targettest.MustDial(t, p.portal()).Login(targettest.LoginOptions{Initiator: first,
		Target: wrapperTarget, ISID: [6]byte{0x80, 9}})
	require.Error(t, err, "a third session")
	require.Equal(t, exitDone, p.terminate())
}

// TestWhatSurvivesIsToldToInitiators checks that only a disk that survives a loss of power offers
// persistent reservations through one.
func TestWhatSurvivesIsToldToInitiators(t *testing.T) {
	const initiator, key = "iqn.2020-01.test:first", 0x1122334455667788
	l := newPlace(t, "a.raw")
	capabilities := func(s *targettest.Session) byte {
		// PTPL_C
		return s.MustGood(t, targettest.PersistIn(1, targettest.ReportCapabilities, 8)).Data[2] & 1
	}
	p := l.serve(t)
	require.Zero(t, capabilities(p.login(initiator, 1)))
	require.Equal(t, exitDone, p.terminate())

	volume := "PERSISTENT_DIR=" + t.TempDir()
	p = l.serve(t, volume)
	s := p.login(initiator, 1)
	require.EqualValues(t, 1, capabilities(s))
	s.MustGood(t, targettest.PersistOut(1,
		targettest.Persist{Action: targettest.PersistRegister, ActionKey: key,
			Bits: targettest.APTPL}))
	require.Equal(t, exitDone, p.terminate())
	p = l.serve(t, volume)
	keys := p.login(initiator, 1).MustGood(t, targettest.PersistIn(1, targettest.ReadKeys, 64)).Data
	require.Contains(t, string(keys), "\x11\x22\x33\x44\x55\x66\x77\x88", "kept over a restart")
	require.Equal(t, exitDone, p.terminate())
}

func TestEphemeralFlushReachesTheDisk(t *testing.T) {
	for setting, durable := range map[string]string{"false": `"durable":false`,
		"true": `"durable":true`} {
		l := newPlace(t, "a.raw")
		p := l.serve(t, "EPHEMERAL_FLUSH="+setting)
		require.Equal(t, exitDone, p.terminate())
		state, err := os.ReadFile(filepath.Join(l.dir, "work", "a.raw", "state.json"))
		require.NoError(t, err)
		require.Contains(t, string(state), durable)
	}
}
