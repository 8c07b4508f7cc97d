package instance

import (
	"bufio"
	"bytes"
	"fmt"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
)

// killEvery is how many writes lie between two snapshots.
const killEvery = 64

func killName(n uint64) string { return fmt.Sprintf("s%d", n) }

// killSnapshots takes a snapshot after write number n, drops an older one, and sometimes goes back
// to the one before. It reports what it has done.
func killSnapshots(t *testing.T, inst *Instance, n uint64, out *bufio.Writer) {
	there := map[string]bool{}
	for _, s := range inst.Snapshots() {
		there[s.Name] = true
	}
	say := func(what string, n uint64) {
		fmt.Fprintf(out, "%s %d\n", what, n)
		require.NoError(t, out.Flush())
	}
	require.NoError(t, TakeSnapshot(t.Context(), killName(n), inst))
	say("taken", n)
	for name := range there {
		old, err := strconv.ParseUint(name[1:], 10, 64)
		require.NoError(t, err)
		if old+3*killEvery <= n {
			say("dropping", old)
			require.NoError(t, inst.DeleteSnapshot(t.Context(), name))
			say("dropped", old)
		}
	}
	if before := n - killEvery; n/killEvery%5 == 4 && there[killName(before)] {
		say("reverting", before)
		require.NoError(t, inst.Revert(t.Context(), killName(before)))
		say("reverted", before)
	}
}

// killModel is what a disk and its snapshots must hold, by what a process has reported.
type killModel struct {
	t        *testing.T
	content  []byte
	snaps    map[uint64][]byte
	dropping uint64 // 0: none
	instead  []byte // what the disk was being reverted to
}

func (m *killModel) says(line string) {
	var what string
	var n uint64
	if _, err := fmt.Sscanf(line, "%s %d", &what, &n); err != nil {
		m.t.Errorf("the process says %q", line)
		return
	}
	switch what {
	case "written":
		off, p := killWrite(n)
		copy(m.content[off:], p)
	case "taken":
		m.snaps[n] = filetest.Clone(m.content)
	case "dropping":
		m.dropping = n
	case "dropped":
		delete(m.snaps, n)
		m.dropping = 0
	case "reverting":
		m.instead = m.snaps[n]
	case "reverted":
		m.content, m.instead = filetest.Clone(m.snaps[n]), nil
	default:
		m.t.Errorf("the process says %q", line)
	}
}

// check compares all content after a kill. The write next was under way.
func (m *killModel) check(inst *Instance, last uint64) {
	for _, s := range inst.Snapshots() {
		var n uint64
		_, err := fmt.Sscanf(s.Name, "s%d", &n)
		require.NoError(m.t, err)
		want, known := m.snaps[n]
		if !known && n == last { // it was taken, and nobody was told any more
			want = filetest.Clone(m.content)
			m.snaps[n] = want
		}
		require.NotNil(m.t, want, "%s was deleted", s.Name)
		require.Equal(m.t, -1, filetest.FirstDifference(want, contentOf(m.t, inst, s.Name)), s.Name)
	}
	for n := range m.snaps {
		view, err := inst.OpenSnapshot(killName(n))
		if n == m.dropping && err != nil {
			delete(m.snaps, n)
			continue
		}
		require.NoError(m.t, err)
		require.NoError(m.t, view.Close())
	}
	got := filetest.ReadAll(m.t, inst, inst.Size())
	if m.instead != nil && bytes.Equal(got, m.instead) {
		m.content = filetest.Clone(got)
	}
	m.dropping, m.instead = 0, nil
	off, p := killWrite(last + 1) // it may be there, in part or not at all
	for i := 0; i < len(p); i += disk.SectorSize {
		if at := int(off) + i; bytes.Equal(got[at:at+disk.SectorSize], p[i:i+disk.SectorSize]) {
			copy(m.content[at:], p[i:i+disk.SectorSize])
		}
	}
	require.Equal(m.t, -1, filetest.FirstDifference(m.content, got), "after write %d", last)
}
