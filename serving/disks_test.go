package serving

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

func released(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestUses(t *testing.T) {
	u := uses{idle: make(chan struct{})}
	require.True(t, u.Begin())
	require.True(t, u.Begin())
	u.End()
	u.remove()
	require.False(t, u.Begin())
	require.False(t, released(u.Released()))
	require.True(t, u.Removed())
	u.End()
	require.True(t, released(u.Released()))
	require.False(t, u.Begin(), "nor is it released twice")
}

// TestRemovedDisksAreForgotten: what was removed costs nothing once it is released.
func TestRemovedDisksAreForgotten(t *testing.T) {
	s, d := served(t)
	opt := d.Options
	for range 100 {
		<-testtool.Must(s.Remove(1))(t)
		require.NoError(t, s.Add(opt))
	}
	require.LessOrEqual(t, len(s.leaving), 1)
	require.Empty(t, s.changing)
	for range 100 {
		s.Attach("iqn.a").Detach()
	}
	require.Empty(t, s.peers)
}

func TestParseAccessMode(t *testing.T) {
	for _, mode := range []AccessMode{AccessWriteExclusive, AccessWriteShared, AccessReadShared} {
		require.Equal(t, mode, testtool.Must(ParseAccessMode(string(mode)))(t))
	}
	require.Equal(t, AccessWriteExclusive, testtool.Must(ParseAccessMode(""))(t))
	_, err := ParseAccessMode("Write-Shared")
	require.ErrorContains(t, err, `"Write-Shared" is unknown; use write-exclusive`)
}

// TestTroubleOfAQuestion: a client that could not ask what is allocated may never ask again. It
// reads, and that shows that the content can be had.
func TestTroubleOfAQuestion(t *testing.T) {
	later := time.Now().Add(time.Hour)
	for kind, readEnds := range map[string]bool{status.TroubleNotNow: true,
		status.TroubleReadError: true, status.TroubleReservations: false} {
		var tr troubles
		tr.Failed(kind, OpOther, "question", "", errors.New("bad"), time.Now())
		for _, op := range []Operation{OpRead, OpWrite} {
			tr.Worked(op, op.String())
		}
		require.Equal(t, readEnds, tr.all[kind].over(later), kind)
		tr.Worked(OpOther, "question")
		require.True(t, tr.all[kind].over(later), kind)
	}
}
