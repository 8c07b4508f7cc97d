package iscsi

import (
	"bytes"
	bin "encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/targettest"
)

// atomicRange is the range that one initiator writes atomically. Each write is a generation, and
// every block contains its generation.
type atomicRange struct {
	initiator string
	lba       uint64
	blocks    int
	sent      uint64 // the last generation that was sent
	answered  uint64 // the last one that the target acknowledged
	answers   atomic.Uint64
}

// content is what the range holds after a generation.
func (r *atomicRange) content(generation uint64) []byte {
	p := make([]byte, 0, r.blocks*512)
	for i := range r.blocks {
		header := bin.BigEndian.AppendUint64(bin.BigEndian.AppendUint64(nil, generation),
			r.lba+uint64(i))
		p = append(p, bytes.Repeat(header, 512/len(header))...)
	}
	return p
}

// write sends one generation after the other until the target is gone.
func (r *atomicRange) write(s *targettest.Session) error {
	for {
		r.sent++
		cdb := make([]byte, 16)
		cdb[0] = 0x9c
		bin.BigEndian.PutUint64(cdb[2:], r.lba)
		bin.BigEndian.PutUint16(cdb[12:], uint16(r.blocks))
		result, err := s.Do(targettest.Command{LUN: 1, CDB: cdb, Write: r.content(r.sent)})
		if err != nil {
			return nil // killed
		}
		if !result.Good() {
			return fmt.Errorf("%s: WRITE ATOMIC of %d blocks: %s", r.initiator, r.blocks,
				result.Failed())
		}
		r.answered = r.sent
		r.answers.Add(1)
	}
}

// check reads the range after a restart and continues from the generation that it holds.
func (r *atomicRange) check(t *testing.T, s *targettest.Session, image []byte) {
	t.Helper()
	got := rig.Do(t, s, targettest.Read10(1, uint32(r.lba), r.blocks)).Data
	found := bin.BigEndian.Uint64(got)
	want := r.content(found)
	if r.answered == 0 && bytes.Equal(got[:512], image[r.lba*512:][:512]) {
		found, want = 0, image[r.lba*512:][:len(got)]
	}
	for i := range r.blocks {
		require.Equal(t, want[i*512:][:512], got[i*512:][:512],
			"block %d of %d is not of generation %d, unlike the first", i, r.blocks, found)
	}
	require.GreaterOrEqual(t, found, r.answered, "an acknowledged atomic write is lost")
	require.LessOrEqual(t, found, r.sent)
	r.sent, r.answered = found, found
}

// TestKilledAtomicWrites kills the daemon with SIGKILL, again and again, while initiators send
// atomic writes to a persistent disk. The kill comes at any moment, even while an atomic write has
// yet to be undone. Afterwards each range holds exactly one generation, not older than the last
// acknowledged one.
func TestKilledAtomicWrites(t *testing.T) {
	t.Parallel()
	rig.Need(t)
	rounds := 24
	if n, err := strconv.Atoi(os.Getenv("KUBEVIRT_DISK_KILL_ROUNDS")); err == nil {
		rounds = n
	}
	dir, state := rig.DiskDir(t, 8<<20), t.TempDir()
	image := testtool.Must(os.ReadFile(filepath.Join(dir, "disk.raw")))(t)
	volume := rig.NewVolume(t, state)
	c := rig.Config{DiskDir: dir, StateDir: state,
		Env: map[string]string{"ACCESS_MODE": "write-shared", "PERSISTENT_DIR": volume}}
	ranges := []*atomicRange{
		{initiator: "iqn.2026-01.test:largest", lba: 1024, blocks: 256},
		{initiator: "iqn.2026-01.test:middle", lba: 4096, blocks: 64},
		{initiator: "iqn.2026-01.test:smallest", lba: 8192, blocks: 8},
	}
	undone, answered, begin := 0, uint64(0), map[*atomicRange]uint64{}
	for round := range rounds {
		d := rig.Start(t, c)
		var writers sync.WaitGroup
		errs := make(chan error, len(ranges))
		for _, r := range ranges {
			s := rig.LoginTo(t, d, r.initiator)
			begin[r] = r.answered
			writers.Go(func() { errs <- r.write(s) })
		}
		time.Sleep(time.Duration(rand.IntN(100)) * time.Millisecond)
		switch {
		case round == 0: // on slow storage one write may take longer than any other round lasts
			d.Until("an atomic write is acknowledged",
				func() bool { return ranges[2].answers.Load() > 0 })
		case round%2 == 1:
			awaitAtomicRecord(t, volume)
		}
		d.Crash()
		writers.Wait()
		for range ranges {
			require.NoError(t, <-errs)
		}
		if len(atomicRecords(t, volume)) > 0 {
			undone++
		}
		d = rig.Start(t, c)
		require.Empty(t, atomicRecords(t, volume),
			"the undo record must be gone once the write is undone")
		s := rig.LoginTo(t, d, "iqn.2026-01.test:reader")
		for _, r := range ranges {
			answered += r.answered - begin[r]
			r.check(t, s, image)
		}
		d.Crash()
	}
	t.Logf("%d atomic writes were acknowledged; in %d of %d rounds one had to be undone", answered,
		undone, rounds)
	require.Positive(t, answered)
	require.Positive(t, undone, "the daemon was never killed during an atomic write")
}

// atomicRecords lists the files in which a disk of the volume keeps the old content during an
// atomic write.
func atomicRecords(t *testing.T, volume string) []string {
	t.Helper()
	return testtool.Must(filepath.Glob(filepath.Join(volume, "*.unit-*", "atomic-write")))(t)
}

func awaitAtomicRecord(t *testing.T, volume string) {
	t.Helper()
	testtool.Within(t, rig.Timeout, func() bool { return len(atomicRecords(t, volume)) > 0 },
		"an atomic write has made a record")
}
