package kubevirt

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// stays is a machine with a claim: stopped and started, and switched off by its guest, it has what
// was written. So has the claim when the machine is deleted.
func (c *cluster) stays(t *testing.T) {
	dir := c.volume(t, "stays-disk", "ReadWriteOnce")
	c.Apply(t, c.manifest(t, "stays.yaml"))
	m := c.running(t, "stays")
	m.write("/dev/vda")
	m.writes(20)
	written := m.found("/dev/vda")

	gone := m.ends()
	c.virtctl(t, "stop", m.name)
	gone()
	kept(t, dir, written)
	c.virtctl(t, "start", m.name)
	m.boots()
	m.has("/dev/vda", written)

	gone = m.ends()
	m.run("(sleep 1; poweroff -f) >/dev/null 2>&1 </dev/null & true")
	gone()
	m.boots() // runStrategy Always
	m.has("/dev/vda", written)
	m.delete("vm")
	kept(t, dir, written)
}

// kept compares what a guest has written, as found counts it, with the disk of a claim.
func kept(t *testing.T, dir string, writes int) {
	t.Helper()
	disk, err := os.Open(filepath.Join(dir, "disk.img")) // it may be larger than the memory
	require.NoError(t, err)
	defer disk.Close()
	sector := make([]byte, 512)
	for i := 1; i <= writes; i++ {
		require.NoError(t, testtool.Err(disk.ReadAt(sector, int64(firstWrite+i)*512)))
		require.Equal(t, fmt.Sprintln(i), string(bytes.TrimRight(sector, "\x00")),
			"write %d of %d", i, writes)
	}
}
