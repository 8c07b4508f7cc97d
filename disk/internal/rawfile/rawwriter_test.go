package rawfile

import (
	"bytes"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
)

// TestPaceTakesTheFasterWay writes at invented speeds, in megabytes per second.
func TestPaceTakesTheFasterWay(t *testing.T) {
	now := time.Unix(0, 0)
	write := func(p *pace, total int64, speeds ...float64) (written [ways]int64,
		took time.Duration) {
		begin := now
		for total > 0 {
			way, n := p.choice(), int64(1<<20)
			p.begin(way, now)
			now = now.Add(time.Duration(float64(n) * 1e3 / speeds[way]))
			p.end(way, n, now)
			written[way] += n
			total -= n
		}
		return written, now.Sub(begin)
	}
	const total = 4 << 30
	t.Run("slow storage", func(t *testing.T) {
		written, took := write(newPace(true), total, 3000, 2900, 100)
		require.Less(t, written[pastCache], int64(32<<20))
		require.Less(t, took.Seconds(), 1.2*total/3e9)
	})
	t.Run("memory is hard to find", func(t *testing.T) {
		written, took := write(newPace(true), total, 300, 310, 1500)
		require.Less(t, written[smallFolios]+written[largeFolios], int64(64<<20))
		require.Less(t, took.Seconds(), 1.1*total/1.5e9)
	})
	t.Run("a small file goes through the cache", func(t *testing.T) {
		written, _ := write(newPace(true), paceSpan-1, 10, 10, 1500)
		require.Zero(t, written[pastCache])
	})
	t.Run("the faster one becomes the slower one", func(t *testing.T) {
		p := newPace(true)
		write(p, total, 3000, 2900, 1500)
		written, _ := write(p, 256<<20, 300, 310, 1500)
		require.Less(t, written[smallFolios]+written[largeFolios], int64(32<<20))
		written, _ = write(p, 256<<20, 300, 310, 100)
		require.Less(t, written[pastCache], int64(32<<20))
	})
	t.Run("the slower one becomes the faster one", func(t *testing.T) {
		p := newPace(true)
		write(p, 256<<20, 300, 310, 1500)
		written, _ := write(p, 1<<30, 3000, 1000, 1500)
		require.Greater(t, written[smallFolios], int64(512<<20))
	})
	t.Run("only the cache", func(t *testing.T) {
		written, _ := write(newPace(false), total, 10, 20, 1500)
		require.Zero(t, written[pastCache])
	})
}

func TestRawWriter(t *testing.T) {
	const chunk, chunks = 1 << 20, 12
	content := make([]byte, chunk*chunks+disk.SectorSize)
	r := rand.New(rand.NewPCG(3, 3))
	for off := 0; off < len(content); off += holeSize {
		if block := off / holeSize; block%7 < 3 || block > 600 && block < 1400 {
			p := content[off:min(off+holeSize, len(content))]
			for i := range p {
				p[i] = byte(r.Uint32())
			}
		}
	}
	for name, test := range map[string]struct{ only, shift int }{
		"any way":                     {-1, 0},
		"small folios":                {smallFolios, 0},
		"large folios":                {largeFolios, 0},
		"past the cache":              {pastCache, 0},
		"memory that storage refuses": {pastCache, 1},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "disk.raw")
			f, err := os.Create(path)
			require.NoError(t, err)
			defer f.Close()
			require.NoError(t, f.Truncate(int64(len(content))))
			direct, err := OpenDirect(f)
			if err != nil {
				t.Skip("skipped: the file system of the temporary directory has no way past the " +
					"page cache")
			}
			defer direct.Close()
			w := NewWriter(f, direct)
			w.Places = &Places{file: f}
			if test.only >= 0 {
				w.pace.rates = [ways]float64{1, 1, 1}
				w.pace.rates[test.only] = math.Inf(1)
				for way := range ways {
					w.pace.retry[way] = time.Now().Add(time.Hour)
				}
				w.pace.choose()
			}
			var group sync.WaitGroup
			var mu sync.Mutex
			total := int64(0)
			for i := 0; i < len(content); i += chunk {
				group.Go(func() {
					part := content[i:min(i+chunk, len(content))]
					p := make([]byte, chunk+1)[test.shift:][:len(part)]
					copy(p, part)
					n, err := w.Store(p, int64(i))
					if err != nil {
						t.Error(err)
					}
					mu.Lock()
					defer mu.Unlock()
					total += n
				})
			}
			group.Wait()
			expected, err := Count(content, 0)
			require.NoError(t, err)
			require.Equal(t, expected, total)
			require.True(t, bytes.Equal(content, filetest.Content(t, path)))
			var st unix.Stat_t
			require.NoError(t, unix.Fstat(int(f.Fd()), &st))
			require.Less(t, st.Blocks*512, expected+expected/4, "zeros are holes")
			if test.only >= 0 && test.shift == 0 {
				require.Equal(t, test.only, w.pace.way)
				require.False(t, math.IsInf(w.pace.rates[test.only], 1), "the way was used")
			}
		})
	}
}

func TestLeadingRun(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		p := filetest.Sample(512*(1+r.IntN(64)), r.Uint64())
		off := int64(r.IntN(64)) * 512
		for at := 0; at < len(p); {
			zero, n := LeadingRun(p[at:], off+int64(at))
			require.Positive(t, n)
			if zero {
				require.Equal(t, make([]byte, n), p[at:at+n])
			}
			if end := off + int64(at+n); at+n < len(p) {
				require.Zero(t, end%holeSize, "runs end at blocks of the file system")
			}
			at += n
		}
	}
	require.False(t, AllZero([]byte{0, 0, 0, 0, 0, 0, 0, 0, 1}))
	require.False(t, AllZero([]byte{0, 1}))
	require.True(t, AllZero(nil))
}
