package serving

import (
	"errors"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestGeneration: the content of a disk has one name over restarts, until it is replaced. A name
// that cannot be kept is none.
func TestGeneration(t *testing.T) {
	r := newRelays(t)
	r.store.broken = errors.New("broken")
	require.ErrorContains(t, testtool.Err(r.d.Generation()), "cannot be saved: broken")
	r.store.broken = nil
	first := testtool.Must(r.d.Generation())(t)
	require.NotEmpty(t, first)
	boot := r.d.Boot
	r.restart()
	require.Equal(t, first, testtool.Must(r.d.Generation())(t))
	require.NotEqual(t, boot, r.d.Boot)
	require.NoError(t, EndGeneration(r.store))
	r.restart()
	require.NotEqual(t, first, testtool.Must(r.d.Generation())(t))
	_, d := served(t, func(o *Options) { o.Disk, o.ReadOnly = r.content, true })
	require.Empty(t, testtool.Must(d.Generation())(t), "nobody writes it")
}

// TestLastUser: a client finds out whether others have used the disk since it did, also after a
// restart. Resume keeps others from coming between.
func TestLastUser(t *testing.T) {
	r := newRelays(t)
	a := r.relay("a", false)
	require.False(t, r.d.LastUsedBy("cert:vm", "a"))
	require.True(t, a.writes())
	require.True(t, r.d.LastUsedBy("cert:vm", "a"))
	r.restart()
	require.True(t, r.d.LastUsedBy("cert:vm", "a"))
	a = r.relay("a", false)
	a.Resume(r.d)
	other := relay{r, r.s.Attach("iqn.2026-01.test:other")}
	require.False(t, other.writes(), "it came between")
	a.Detach()
	require.True(t, other.writes())
	other.Detach()
	a = r.relay("a", false)
	a.Resume(r.d)
	require.False(t, r.d.LastUsedBy("cert:vm", "a"))
	r.restart()
	require.False(t, r.d.LastUsedBy("cert:vm", "a"))
}

// TestNobodyIsTheLastAfterASharedTime: an exclusive disk was open to everybody meanwhile, since a
// reload or a restart. Whoever had it before may not repeat what it wrote.
func TestNobodyIsTheLastAfterASharedTime(t *testing.T) {
	for name, share := range map[string]func(r *relays){
		"a reload": func(r *relays) {
			require.NoError(t, r.s.SetAccess(1, AccessWriteShared, false))
		},
		"two reloads": func(r *relays) {
			require.NoError(t, r.s.SetAccess(1, AccessReadShared, false))
			require.NoError(t, r.s.SetAccess(1, AccessWriteShared, false))
		},
		"a restart": func(r *relays) {
			served(t, func(o *Options) {
				o.Store, o.Disk, o.Access = r.store, r.content, AccessWriteShared
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRelays(t)
			a := r.relay("a", false)
			require.True(t, a.writes())
			a.Detach()
			share(r)
			r.restart()
			require.False(t, r.d.LastUsedBy("cert:vm", "a"))
			require.Equal(t, "cert:vm", r.d.Owner(), "a handover still fences it")
			require.True(t, r.relay("b", false).writes())
		})
	}
}

// slowShelf is a shelf on which a Save takes until its gate opens.
type slowShelf struct {
	shelf
	begun, gate chan struct{}
	saved       atomic.Bool
}

func (s *slowShelf) Save(name string, data []byte) error {
	close(s.begun)
	<-s.gate
	s.saved.Store(true)
	return s.shelf.Save(name, data)
}

// TestEachRequestWaitsForItsOwner: of two first requests, none goes on before it is stored who uses
// the disk.
func TestEachRequestWaitsForItsOwner(t *testing.T) {
	store := &slowShelf{shelf: shelf{data: map[string][]byte{}}, begun: make(chan struct{}),
		gate: make(chan struct{})}
	s, d := served(t, func(o *Options) { o.Store = store })
	require.True(t, s.Attach("iqn.2026-01.test:a").Claim(d))
	first, second := make(chan struct{}), make(chan bool, 1)
	go func() {
		defer close(first)
		s.KeepOwner(d)
	}()
	<-store.begun
	go func() {
		s.KeepOwner(d)
		second <- store.saved.Load()
	}()
	for range 1000 { // whoever does not wait is through by now
		runtime.Gosched()
	}
	close(store.gate)
	<-first
	require.True(t, <-second)
}

// TestOwnerThatCannotBeStored: storage is full when a disk gets its owner. Requests go on, and who
// uses the disk is stored when that works again.
func TestOwnerThatCannotBeStored(t *testing.T) {
	store := &fullShelf{shelf: shelf{data: map[string][]byte{}}, full: true}
	s, d := served(t, func(o *Options) { o.Store = store })
	require.True(t, s.Attach("iqn.2026-01.test:a").Claim(d))
	for range 10 {
		s.KeepOwner(d)
	}
	require.Equal(t, 1, store.tries, "not each request tries again")
	require.Empty(t, store.data)
	later := func() { d.unkept.Load().again = time.Now() }
	later()
	s.KeepOwner(d)
	require.Equal(t, 2, store.tries)
	store.full = false
	later()
	for range 10 {
		s.KeepOwner(d)
	}
	require.Equal(t, 3, store.tries)
	require.Contains(t, string(store.data[storedHandover]), "iqn.2026-01.test:a")
}

// fullShelf is a shelf that may be full.
type fullShelf struct {
	shelf
	full  bool
	tries int
}

func (s *fullShelf) Save(name string, data []byte) error {
	s.tries++
	if s.full {
		return syscall.ENOSPC
	}
	return s.shelf.Save(name, data)
}
