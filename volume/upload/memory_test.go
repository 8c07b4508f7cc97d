//go:build !race

package upload // With the race detector, everything takes more memory.

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/packtest"
)

// TestMemoryOfUploads: an upload takes less than 32 MiB, whatever its packing needs. Each one waits
// halfway, with everything that it needs.
func TestMemoryOfUploads(t *testing.T) {
	raw := make([]byte, 24<<20)
	_, _ = rand.NewChaCha8([32]byte{}).Read(raw)
	all := packed(t, raw)
	all["xz"] = packtest.XzNeeding(raw, 24) // 16 MiB
	const uploads, most = 4, 32 << 20
	for name, data := range all {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			before := heap()
			for i := range uploads {
				s.begin(t, http.MethodPut, fmt.Sprintf("/volume/vm%d/data", i),
					data[:len(data)-1], len(data))
			}
			s.waitFor(t, uploads*(len(data)-1)&^(1<<20-1))
			each := (heap() - before) / uploads
			t.Logf("%d KiB for each", each>>10)
			require.Less(t, each, int64(most))
		})
	}
}

// heap is the memory in use, in bytes.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse)
}
