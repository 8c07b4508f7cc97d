package target

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/target/internal/pdu"
)

// TestCommandNumbers sends random numbered requests around the end of the number space. Some are
// rejected, some of these are sent again, and commands end at random. As long as commands end,
// there is room for more. Nothing is received twice, MaxCmdSN never goes back, and the memory for
// rejected requests is limited.
func TestCommandNumbers(t *testing.T) {
	for _, width := range []int{1, 2, 7} {
		s := &session{conn: &conn{srv: &Server{pool: noMemory()}}, width: width}
		next := uint32(1<<32 - 500)
		s.window.exp.Store(next)
		s.window.max.Store(next + uint32(width) - 1)
		rng := rand.New(rand.NewPCG(1, uint64(width)))
		var rejected []uint32
		request := func(sn uint32) {
			require.Equal(t, admitNow, s.admit(sn, false), "%#x", sn)
			if rng.IntN(3) == 0 {
				s.refuse(sn)
				rejected = append(rejected, sn)
				return
			}
			s.counted++
			s.received(sn, false)
			require.Equal(t, admitNever, s.admit(sn, false), "%#x comes again", sn)
		}
		for range 2000 {
			before := s.window.max.Load()
			switch {
			case s.counted > 0 && (pdu.SNLess(s.window.max.Load(), next) || rng.IntN(2) == 0):
				s.counted--
				s.reopen()
			case len(rejected) > 0 && rng.IntN(3) == 0:
				sn := rejected[len(rejected)-1]
				rejected = rejected[:len(rejected)-1]
				if _, kept := s.refused[sn]; kept {
					request(sn)
				} else {
					require.Equal(t, admitNever, s.admit(sn, false), "%#x is forgotten", sn)
				}
			default:
				require.False(t, pdu.SNLess(s.window.max.Load(), next), "no room for %#x in a "+
					"window for %d, of which %d are taken", next, width, s.counted)
				request(next)
				next++
			}
			require.False(t, pdu.SNLess(s.window.max.Load(), before), "MaxCmdSN goes back")
			require.LessOrEqual(t, len(s.refused), width+1)
			require.LessOrEqual(t, s.counted, 2*width+1)
		}
		require.Less(t, next, uint32(1<<31), "the numbers have wrapped around")
	}
}
