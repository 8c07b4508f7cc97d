package instance

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// These variables tell the test binary that it is the process to be killed, and which disk it
// writes to.
const (
	killedImage = "KUBEVIRT_DISK_TEST_IMAGE"
	killedDir   = "KUBEVIRT_DISK_TEST_DIR"
	killedMode  = "KUBEVIRT_DISK_TEST_MODE"
	killedFirst = "KUBEVIRT_DISK_TEST_FIRST" // number of the first write
	killedSnaps = "KUBEVIRT_DISK_TEST_SNAPS" // with snapshots
	killRounds  = "KUBEVIRT_DISK_KILL_ROUNDS"
)

const killSize = 24 << 20

// killWrite returns the place and the content of write number n. Some writes cover blocks, some
// only a part of one.
func killWrite(n uint64) (off int64, p []byte) {
	r := rand.New(rand.NewPCG(n, 3))
	off = r.Int64N(killSize/disk.SectorSize-64) * disk.SectorSize
	if r.IntN(2) == 0 {
		off = off / 4096 * 4096 // the block of a map
	}
	p = bytes.Repeat(binary.LittleEndian.AppendUint64(nil, n), disk.SectorSize/8*(1+r.IntN(16)))
	return off, p
}

func killOptions(dir, mode string) Options {
	opt := Options{Mode: CopyMode(mode), WorkDir: filepath.Join(dir, "work")}
	if filepath.Base(dir) == "persistent" {
		opt.PersistentDir = filepath.Join(dir, "volume")
	}
	return opt
}

// TestWriteUntilKilled is the process that TestKill kills. It writes, and reports each acknowledged
// write.
func TestWriteUntilKilled(t *testing.T) {
	if os.Getenv(killedImage) == "" {
		t.Skip("is run by TestKill")
	}
	inst := testtool.Must(Open(t.Context(), openGood(t, os.Getenv(killedImage)),
		killOptions(os.Getenv(killedDir), os.Getenv(killedMode))))(t)
	n := testtool.Must(strconv.ParseUint(os.Getenv(killedFirst), 10, 64))(t)
	out := bufio.NewWriter(os.Stdout)
	for ; ; n++ {
		off, p := killWrite(n)
		filetest.Write(t, inst, p, off)
		fmt.Fprintf(out, "written %d\n", n)
		require.NoError(t, out.Flush())
		if n%64 == 0 {
			require.NoError(t, inst.Flush())
			if os.Getenv(killedSnaps) != "" {
				killSnapshots(t, inst, n, out)
			}
		}
	}
}

// TestKill ends a process with SIGKILL, again and again, while it writes to a disk and copies its
// image. The page cache survives that. So every acknowledged write is there, and the image
// everywhere else. It may also take, delete and revert to snapshots, while layers are merged beside
// it. Each snapshot has its content byte by byte.
func TestKill(t *testing.T) {
	rounds := testtool.Rounds(12, 96)
	if n, err := strconv.Atoi(os.Getenv(killRounds)); err == nil {
		rounds = n
	}
	content := filetest.Sample(killSize, 1)
	image := filetest.Put(t, t.TempDir(), "disk.raw", content, 0)
	kill := func(t *testing.T, mode CopyMode, kind string, snapshots bool) {
		t.Parallel()
		dir := filepath.Join(t.TempDir(), kind)
		m := &killModel{t: t, content: filetest.Clone(content), snaps: map[uint64][]byte{}}
		next, acknowledged, taken := uint64(1), uint64(0), 0
		for round := range rounds / 6 {
			last := killOnce(t, image, dir, mode, next, snapshots || round%2 == 1, snapshots,
				m.says)
			acknowledged += last + 1 - next
			taken += len(m.snaps)
			inst, err := Open(t.Context(), openGood(t, image), killOptions(dir, string(mode)))
			require.NoError(t, err)
			require.True(t, inst.kept || last == 0)
			m.check(inst, last)
			next = last + 2
			// Without this lock, a process that another subtest is starting could have inherited
			// the lock file, and keep it until it runs its program.
			syscall.ForkLock.Lock()
			err = inst.Close()
			syscall.ForkLock.Unlock()
			require.NoError(t, err)
		}
		require.Positive(t, acknowledged, "the process was always killed too early")
		require.Equal(t, snapshots, taken > 0, "the process was always killed too early")
	}
	for _, mode := range []CopyMode{CopyOnWrite, CopyOnRead, CopyClone} {
		for _, kind := range []string{"ephemeral", "persistent"} {
			t.Run(string(mode)+"/"+kind, func(t *testing.T) { kill(t, mode, kind, false) })
			t.Run(string(mode)+"/"+kind+"/snapshots", func(t *testing.T) {
				kill(t, mode, kind, true)
			})
		}
	}
}

// killOnce runs the process for a random time and returns the number of its last acknowledged
// write. If asked, the time starts at its first write, or at the first snapshot if it takes some.
// says gets each line about writes and snapshots.
func killOnce(t *testing.T, image, dir string, mode CopyMode, first uint64,
	writing, snapshots bool, says func(line string)) (last uint64) {
	child := exec.Command(os.Args[0], "-test.run=^TestWriteUntilKilled$")
	child.Env = append(os.Environ(), killedImage+"="+image, killedDir+"="+dir,
		killedMode+"="+string(mode), killedFirst+"="+strconv.FormatUint(first, 10))
	if snapshots {
		child.Env = append(child.Env, killedSnaps+"=1")
	}
	out := testtool.Must(child.StdoutPipe())(t)
	require.NoError(t, child.Start())
	after := time.Duration(20+rand.IntN(400)) * time.Millisecond
	begin := after
	if writing {
		begin = time.Hour // until its first write
	}
	timer := time.AfterFunc(begin, func() { child.Process.Kill() })
	defer timer.Stop()
	last = first - 1
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if begun := !snapshots || strings.HasPrefix(lines.Text(), "taken "); writing && begun {
			timer.Reset(after)
			writing = false
		}
		_, _ = fmt.Sscanf(lines.Text(), "written %d", &last)
		says(lines.Text())
	}
	child.Wait() // it was killed
	return last
}

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
		old := testtool.Must(strconv.ParseUint(name[1:], 10, 64))(t)
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
		require.NoError(m.t, testtool.Err(fmt.Sscanf(s.Name, "s%d", &n)))
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
