package serving

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

// served returns a set with disk 1, which is exclusive unless changed.
func served(t *testing.T, change ...func(*Options)) (*Disks, *Disk) {
	t.Helper()
	s := New(Config{})
	opt := Options{Number: 1, Name: "disk.raw", Disk: disktest.NewMemory(1 << 20),
		Identity: disk.Identity{Serial: "1", NAA: [8]byte{0x30, 7: 1}}}
	for _, c := range change {
		c(&opt)
	}
	require.NoError(t, s.Add(opt))
	return s, s.At(1)
}

// TestGuestDoesNotClaim opens a disk that nobody owns to the second machine while a request of it
// is about to take the disk. As owner and guest at once it would be fenced by its own handover.
func TestGuestDoesNotClaim(t *testing.T) {
	s, d := served(t)
	c := s.Attach("iqn.b")
	s.mu.Lock()
	admitted := make(chan bool)
	go func() { admitted <- c.Claim(d) }()
	time.Sleep(50 * time.Millisecond) // until it waits for the lock
	d.handover.Store(&handoverState{Guest: "iqn.b"})
	s.mu.Unlock()
	require.True(t, <-admitted)
	require.Empty(t, s.Holders(1).Owner)
	require.NoError(t, testtool.Err(s.HandOver(1)))
	require.Equal(t, Holders{Owner: "iqn.b"}, s.Holders(1))
}

// TestFencedAreBounded hands a LUN over to more and more names.
func TestFencedAreBounded(t *testing.T) {
	s := &handoverState{}
	for i := range maxFenced + 10 {
		s = s.ended(outcome{loser: fmt.Sprintf("iqn.%d", i)})
	}
	require.Len(t, s.Fenced, maxFenced)
	require.Equal(t, "iqn.10", s.Fenced[0])
	require.Equal(t, s.Fenced, s.ended(outcome{}).Fenced)
	s = s.ended(outcome{loser: "iqn.10"})
	require.Len(t, s.Fenced, maxFenced)
	require.Equal(t, "iqn.10", s.Fenced[maxFenced-1], "lost again")
}

// TestFencedIsTrouble: a fenced peer that wants a disk is trouble while nobody else uses it, and
// until a minute has passed.
func TestFencedIsTrouble(t *testing.T) {
	s, d := oneDisk(t, nil)
	former, heir := s.Attach("iqn.a"), s.Attach("iqn.b")
	require.True(t, former.Claim(d))
	require.NoError(t, s.Admit(1, "iqn.b", time.Time{}))
	require.NoError(t, testtool.Err(s.HandOver(1)))
	require.False(t, former.Claim(d))
	require.Empty(t, d.Troubles(time.Now()), "the heir uses it")
	heir.Detach()
	require.False(t, former.Claim(d))
	all := d.Troubles(time.Now())
	require.Len(t, all, 1)
	require.Equal(t, status.TroubleFenced, all[0].Kind)
	require.Equal(t, status.DiskFenced, all[0].State())
	require.Contains(t, all[0].Message, "iqn.a was fenced by a handover")
	require.Empty(t, d.Troubles(time.Now().Add(refusedFor)))
	former.Detach()
}
