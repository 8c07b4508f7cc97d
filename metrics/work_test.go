package metrics

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/serving"
)

// TestWork checks that the work of all initiators at a LUN is added up, and that LUNs without
// commands, or that are not there, have no entry.
func TestWork(t *testing.T) {
	m := newTestMetrics()
	require.Empty(t, m.Work())
	m.RequestDone(command(initiatorA, 1, serving.OpRead, 4096, 30*time.Microsecond, 0))
	m.RequestDone(command("iqn.b", 1, serving.OpRead, 8192, time.Millisecond, 2))
	m.RequestDone(command("iqn.b", 1, serving.OpWrite, 512, 2*time.Millisecond, 0))
	m.RequestDone(command("iqn.b", 1, serving.OpFlush, 0, time.Second, 0))
	m.RequestDone(command("iqn.b", 4000, serving.OpRead, 512, time.Second, 2))
	for i := range 2 * maxInitiators {
		name := string(rune('a' + i))
		m.RequestDone(command("iqn."+name, 2, serving.OpWrite, 1, time.Nanosecond, 0))
	}
	require.Equal(t, map[uint16]Work{
		1: {Read: Done{Commands: 2, Bytes: 12288, Time: 1030 * time.Microsecond},
			Write: Done{Commands: 1, Bytes: 512, Time: 2 * time.Millisecond}},
		2: {Write: Done{Commands: 2 * maxInitiators, Bytes: 2 * maxInitiators,
			Time: 2 * maxInitiators}},
	}, m.Work())
}
