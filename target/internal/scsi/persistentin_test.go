package scsi

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	readKeys         = "5e 00 00 00 00 00 00 ff ff 00"
	readReservation  = "5e 01 00 00 00 00 00 ff ff 00"
	readCapabilities = "5e 02 00 00 00 00 00 ff ff 00"
	readFullStatus   = "5e 03 00 00 00 00 00 ff ff 00"
)

func TestPersistentReserveIn(t *testing.T) {
	b := newBench(t)
	second := b.attach("iqn.second:with-a-longer-name", 0x23)
	requireHex(t, "00000000 00000000", b.good(cdb(readKeys), nil))
	requireHex(t, "00000000 00000000", b.good(cdb(readReservation), nil))
	requireHex(t, "00000000 00000000", b.good(cdb(readFullStatus), nil))

	b.mustPersist(b.nexus, saRegister, 0, 0, 0x1122334455667788)
	b.mustPersist(second, saRegister, 0, 0, 0xa, bitAllTgPt)
	requireHex(t, "00000002 00000010 1122334455667788 000000000000000a", b.good(cdb(readKeys), nil))
	requireHex(t, "00000002 00000010 11223344", b.good(cdb("5e 00 00 00 00 00 00 00 0c 00"), nil))
	requireHex(t, "", b.good(cdb("5e 00 00 00 00 00 00 00 00 00"), nil))
	requireHex(t, "00000002 00000000", b.good(cdb(readReservation), nil))

	// The TransportIDs: "iqn.a,i,0x000000000000" and its zero byte are 23 bytes, "iqn.second:..."
	// 46.
	first := "1122334455667788 00000000 %s 00000000 0001 0000001c" +
		"45 00 0018 69716e2e61 2c692c3078 303030303030303030303030 0000"
	other := "000000000000000a 00000000 %s 00000000 0001 00000034" +
		"45 00 0030 69716e2e7365636f6e643a776974682d612d6c6f6e6765722d6e616d65 2c692c3078 " +
		"323330303030303030303030 0000"
	both := func(a, b string) string {
		return "00000002 00000080" + replace(first, a) + replace(other, b)
	}
	requireHex(t, both("0000", "0200"), b.good(cdb(readFullStatus), nil))
	b.mustPersist(b.nexus, saReserve, typeWriteExclusiveRO, 0x1122334455667788, 0)
	requireHex(t, "00000002 00000010 1122334455667788 00000000 00 05 0000",
		b.good(cdb(readReservation), nil))
	requireHex(t, both("0105", "0200"), b.good(cdb(readFullStatus), nil))
	b.mustPersist(b.nexus, saPreempt, typeExclusiveAccessShared, 0x1122334455667788,
		0x1122334455667788)
	requireHex(t, "00000003 00000010 0000000000000000 00000000 00 08 0000",
		b.good(cdb(readReservation), nil))
	requireHex(t, "00000003 00000080"+replace(first, "0108")+replace(other, "0308"),
		b.good(cdb(readFullStatus), nil))

	require.Equal(t, "5/24/00", b.run(cdb("5e 04 00 00 00 00 00 00 08 00"), nil).outcome())
	require.Equal(t, "5/24/00", b.run(cdb("5e 00 01 00 00 00 00 00 08 00"), nil).outcome())
}

func TestReportCapabilities(t *testing.T) {
	b := newBench(t)
	requireHex(t, "0008 14 90 ea01 0000", b.good(cdb(readCapabilities), nil))
	requireHex(t, "0008 14", b.good(cdb("5e 02 00 00 00 00 00 00 03 00"), nil))
	b = newBench(t, func(l *LUN) { l.Store = &memStore{} })
	requireHex(t, "0008 15 90 ea01 0000", b.good(cdb(readCapabilities), nil))
	b.mustPersist(b.nexus, saRegister, 0, 0, 1, bitAPTPL)
	requireHex(t, "0008 15 91 ea01 0000", b.good(cdb(readCapabilities), nil))
	b.mustPersist(b.nexus, saRegister, 0, 1, 1)
	// the last APTPL counts
	requireHex(t, "0008 15 90 ea01 0000", b.good(cdb(readCapabilities), nil))
}

// TestPersistentCommandsAreReported asks REPORT SUPPORTED OPERATION CODES for each service action.
func TestPersistentCommandsAreReported(t *testing.T) {
	b := newBench(t)
	for action := range byte(32) {
		in := b.good([]byte{opMaintenanceIn, saReportOpcodes, reportAction, opPersistIn, 0, action,
			0, 0, 1, 0, 0, 0}, nil)
		out := b.good([]byte{opMaintenanceIn, saReportOpcodes, reportAction, opPersistOut, 0,
			action, 0, 0, 1, 0, 0, 0}, nil)
		wantIn, wantOut := []byte{0, supportNone, 0, 0}, []byte{0, supportNone, 0, 0}
		if action <= saReadFullStatus {
			wantIn = []byte{0, supportStandard, 0, 10, opPersistIn, action, 0, 0, 0, 0, 0, 0xff,
				0xff, 0}
		}
		if action <= saRegisterIgnore {
			wantOut = []byte{0, supportStandard, 0, 10, opPersistOut, action, 0xff, 0, 0, 0xff,
				0xff, 0xff, 0xff, 0}
		}
		require.Equal(t, wantIn, in, "PERSISTENT RESERVE IN %02x", action)
		require.Equal(t, wantOut, out, "PERSISTENT RESERVE OUT %02x", action)
	}
	request, list := persistOut(0x07, 0, 1, 2)
	require.Equal(t, "5/24/00", b.run(request, list).outcome(), "REGISTER AND MOVE")
}
