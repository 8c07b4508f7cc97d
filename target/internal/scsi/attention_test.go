package scsi

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const testReady = "00 00 00 00 00 00"

func TestNewNexusHasAttention(t *testing.T) {
	b := newBench(t)
	port := InitiatorPort{Name: "iqn.c", ISID: [6]byte{1}}
	n := b.d.Attach(port)
	require.Equal(t, "6/29/00", b.ready(n))
	require.Equal(t, "GOOD", b.ready(n), "it is reported once")
	b.d.Detach(n)

	again := b.d.Attach(port)
	require.Equal(t, "6/29/07", b.ready(again), "the port was here before")
	other := b.d.Attach(InitiatorPort{Name: "iqn.c", ISID: [6]byte{2}})
	require.Equal(t, "6/29/00", b.ready(other))
}

// TestAttentionAndCommands checks which commands report a unit attention, and which leave it
// pending (SAM-5 5.14.1).
func TestAttentionAndCommands(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct {
		name, cdb, want string
		stays           bool
	}{
		{"INQUIRY", "12 00 00 00 24 00", "GOOD", true},
		{"REPORT LUNS", "a0 00 00 00 00 00 00 00 01 00 00 00", "GOOD", true},
		{"REQUEST SENSE", "03 00 00 00 ff 00", "GOOD", false},
		{"TEST UNIT READY", testReady, "6/29/03", false},
		{"READ", "28 00 00 00 00 00 00 00 01 00", "6/29/03", false},
		{"an invalid CDB", "28 20 00 00 00 00 00 00 01 00", "6/29/03", false},
		{"an unknown operation code", "ff 00 00 00 00 00", "6/29/03", false},
		{"REPORT SUPPORTED OPERATION CODES", "a3 0c 00 00 00 00 00 00 01 00 00 00", "6/29/03",
			false},
	} {
		t.Run(c.name, func(t *testing.T) {
			b.nexus.nth(0).pending.Store(0)
			b.d.ResetLUN(lun1)
			r := b.run(cdb(c.cdb), nil)
			require.Equal(t, c.want, r.outcome())
			if c.name == "REQUEST SENSE" {
				requireHex(t, "70 00 06 00000000 0a 00000000 2903 00 000000", r.data)
			}
			require.Equal(t, c.stays, b.nexus.nth(0).pending.Load() != 0)
		})
	}
}

func TestAttentionsAreReportedInOrder(t *testing.T) {
	b := newBench(t)
	a := b.nexus.nth(0)
	a.raise(attnLUNsChanged | attnClearedByOther | attnNexusLoss | attnInquiryChanged)
	a.raise(attnModeChanged | attnCapacityChanged | attnReset | attnPowerOn)
	for _, want := range []string{"6/29/00", "6/29/03", "6/29/07", "6/2a/09", "6/2a/01", "6/2f/00",
		"6/3f/03", "6/3f/0e", "GOOD"} {
		require.Equal(t, want, b.ready(b.nexus))
	}
}

func TestReportLUNsDeliversTheNews(t *testing.T) {
	b := newBench(t)
	b.nexus.nth(0).raise(attnLUNsChanged | attnModeChanged)
	b.good(cdb("a0 00 00 00 00 00 00 00 01 00 00 00"), nil)
	require.Equal(t, "6/2a/01", b.ready(b.nexus))
	require.Equal(t, "GOOD", b.ready(b.nexus))
}

func TestResetsReachEveryNexus(t *testing.T) {
	b := newBench(t)
	other := b.attach("iqn.b", 0)
	for _, reset := range []func(){
		func() { b.d.ResetLUN(lun1) },
		func() { b.d.ResetTarget() },
	} {
		reset()
		for _, n := range []*Nexus{b.nexus, other} {
			require.Equal(t, "6/29/03", b.ready(n))
			require.Equal(t, "GOOD", b.ready(n))
		}
	}
	b.d.ResetLUN(9 << 48)
	require.Equal(t, "GOOD", b.ready(b.nexus))
}

func TestTasksCleared(t *testing.T) {
	b := newBench(t)
	hit, spared := b.attach("iqn.b", 0), b.attach("iqn.c", 0)
	b.d.TasksCleared(lun1, b.nexus, []*Nexus{b.nexus, hit})
	b.d.TasksCleared(9<<48, b.nexus, []*Nexus{spared})
	require.Equal(t, "GOOD", b.ready(b.nexus))
	require.Equal(t, "6/2f/00", b.ready(hit))
	require.Equal(t, "GOOD", b.ready(spared))
}

func TestRequestSense(t *testing.T) {
	b := newBench(t)
	requireHex(t, "70 00 00 00000000 0a 00000000 0000 00 000000",
		b.good(cdb("03 00 00 00 ff 00"), nil))
	requireHex(t, "72 00 00 00 00000000", b.good(cdb("03 01 00 00 ff 00"), nil))
	requireHex(t, "70 00 00 00", b.good(cdb("03 00 00 00 04 00"), nil))
	require.Equal(t, "5/24/00", b.run(cdb("03 02 00 00 ff 00"), nil).outcome())
	requireHex(t, "72 05 25 00 00000000",
		b.runAs(b.nexus, 9<<48, cdb("03 01 00 00 ff 00"), nil).data)
}

func TestKnownPortsAreBounded(t *testing.T) {
	b := newBench(t)
	for i := range maxKnownPorts + 10 {
		b.d.Detach(b.d.Attach(InitiatorPort{Name: "iqn.x", ISID: [6]byte{byte(i), byte(i >> 8)}}))
	}
	require.Len(t, b.d.known, maxKnownPorts)
}

func TestPendingAttention(t *testing.T) {
	b := newBench(t)
	for _, lun := range []uint64{lun1, 0, 9 << 48} {
		info, pending := b.d.PendingAttention(lun, b.nexus)
		require.False(t, pending)
		require.Zero(t, info)
	}
	b.nexus.nth(0).raise(attnNexusLoss)
	info, pending := b.d.PendingAttention(lun1, b.nexus)
	require.True(t, pending)
	require.Equal(t, [3]byte{0x16, 0x29, 0x07}, info, "one, UNIT ATTENTION")
	b.nexus.nth(0).raise(attnPowerOn)
	info, _ = b.d.PendingAttention(lun1, b.nexus)
	require.Equal(t, [3]byte{0x26, 0x29, 0x00}, info, "several, the one of highest precedence")
	require.Equal(t, "6/29/00", b.ready(b.nexus), "they are still pending")
	require.Equal(t, "6/29/07", b.ready(b.nexus))
	_, pending = b.d.PendingAttention(lun1, b.nexus)
	require.False(t, pending)
}
