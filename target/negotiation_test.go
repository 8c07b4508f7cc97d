package target_test

import (
	"errors"
	"math/rand"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	. "kubevirt.io/disk/target/targettest"
)

// TestNegotiationProperty proposes random values in random order, split over random PDUs. Login
// checks that the answers are legal outcomes, and Session that the session keeps to them.
func TestNegotiationProperty(t *testing.T) {
	s := start(t)
	seed := rand.Int63()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewSource(seed))
	length := func() string {
		n := []int{512, 513, 1024, 4096, 8192, 65536, 262144, 1 << 20, 1<<24 - 1}[r.Intn(9)]
		return strconv.Itoa(n)
	}
	yesNo := func() string { return []string{"Yes", "No"}[r.Intn(2)] }
	data := pattern(300*BlockSize, 1)
	refused := 0
	for range 60 {
		o := LoginOptions{Keys: KV("MaxRecvDataSegmentLength", length(), "MaxBurstLength", length(),
			"FirstBurstLength", length(),
			"InitialR2T", yesNo(), "ImmediateData", yesNo(), "MaxOutstandingR2T",
			strconv.Itoa(1+r.Intn(4)),
			"DefaultTime2Wait", strconv.Itoa(r.Intn(10)), "MaxConnections",
			strconv.Itoa(1+r.Intn(8))),
			HeaderDigest: r.Intn(2) == 0, DataDigest: r.Intn(2) == 0, CmdSN: r.Uint32()}
		shuffle := func(keys Keys) {
			r.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
		}
		o.Edit = func(step int, p *LoginPDU) {
			if step == 0 {
				shuffle(p.Keys)
			}
		}
		c := MustDial(t, s.addr)
		sess, err := c.Login(o)
		var le *LoginError
		if errors.As(err, &le) {
			require.Equal(t, uint16(0x0200), le.Status, "%v", o.Keys)
			refused++
			continue
		}
		require.NoError(t, err, "%v", o.Keys)
		_, err = sess.ClearAttention(1)
		require.NoError(t, err)
		blocks := 1 + r.Intn(300)
		w := sess.MustDo(t, Write10(1, 7, data[:blocks*BlockSize]))
		require.True(t, w.Good(), "%v: %s", o.Keys, w.Failed())
		if sess.Params.InitialR2T && !sess.Params.ImmediateData {
			require.Zero(t, w.R2Ts[0].BufferOffset)
		}
		read := sess.MustGood(t, Read10(1, 7, blocks))
		require.Equal(t, data[:blocks*BlockSize], read.Data, "%v", o.Keys)
		require.True(t, read.StatusInData, "good status comes with the last data")
		require.NoError(t, c.Close())
	}
	require.Zero(t, refused, "burst lengths that contradict each other can be answered by "+
		"smaller ones (13.14)")
}
