package foreign

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestMemoryOfTables opens files with holes that have as many blocks as can be checked, and some
// that have more. Whether they are read or refused, the memory for the tables has a limit.
func TestMemoryOfTables(t *testing.T) {
	const most = maxClaims - 2
	sized := func(s *sparse, size int64) *sparse {
		s.size = size
		return s
	}
	vhd := func(blocks int64) *sparse {
		s := vhdOf(16, 8)
		size := blocks * (testBlock + 512)
		s.parts[size-512] = s.parts[64<<10-512]
		delete(s.parts, 64<<10-512)
		return sized(s, size)
	}
	vmdk := func(blocks int64) *sparse {
		s := vmdkOf(1)
		delete(s.parts, 1024) // the directory, which is longer, and has nothing
		delete(s.parts, 1536)
		le := binary.LittleEndian
		le.PutUint64(s.parts[0][12:], 1<<37/vmdkSector)
		le.PutUint64(s.parts[0][64:], 1<<26)
		return sized(s, blocks*testBlock)
	}
	for name, c := range map[string]struct {
		format Format
		file   *sparse
		wrong  string // "": nothing
	}{
		"vhd":                 {VHD, vhd(most), "in its copy of the footer"},
		"vhd, too large":      {VHD, vhd(2 * most), "too many to check"},
		"vdi":                 {VDI, sized(vdiOf(1<<24), most*testBlock), "table lies at"},
		"vdi, few":            {VDI, sized(vdiOf(16), most*testBlock), "where another one is"},
		"vdi, too large":      {VDI, sized(vdiOf(16), 2*most*testBlock), "too many to check"},
		"vmdk":                {VMDK, vmdk(most), ""},
		"vmdk, too large":     {VMDK, vmdk(2 * most), "too many to check"},
		"vhdx":                {VHDX, sized(vhdxOf(100<<30, 512), most<<20), ""},
		"vhdx, too large":     {VHDX, sized(vhdxOf(1<<30, 512), 2*most<<20), "too many to check"},
		"vhdx, a short table": {VHDX, sized(vhdxOf(1<<40, 512), most<<20), "its BAT has"},
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			grew := testtool.HeapGrowth(t, func() {
				_, err = Open(bg, c.format, c.file, c.file.size, Options{})
			})
			require.Less(t, grew, int64(110<<20))
			if c.wrong == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, c.wrong)
			}
		})
	}
}
