package serving

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/rangelock"
	"kubevirt.io/disk/internal/testtool"
)

// shelf is a Store that a restart does not empty.
type shelf struct {
	data   map[string][]byte
	broken error
}

func (s *shelf) Load(name string) ([]byte, error) { return s.data[name], nil }
func (s *shelf) Where(name string) string         { return name }

func (s *shelf) Save(name string, data []byte) error {
	if s.broken != nil {
		return s.broken
	}
	s.data[name] = data
	return nil
}

// relays are clients of one name at a disk.
type relays struct {
	t       *testing.T
	s       *Disks
	d       *Disk
	store   *shelf
	content *disktest.Fault
}

func newRelays(t *testing.T) *relays {
	r := &relays{t: t, store: &shelf{data: map[string][]byte{}},
		content: disktest.NewFault(disktest.NewMemory(1 << 20))}
	r.restart()
	return r
}

func (r *relays) restart() {
	r.s, r.d = served(r.t, func(o *Options) { o.Store, o.Disk = r.store, r.content })
}

// relay is one of them.
type relay struct {
	*relays
	*Client
}

func (r *relays) relay(incarnation string, heir bool) relay {
	return relay{r, r.s.AttachTo(r.d,
		Who{Name: "cert:vm", Incarnation: incarnation, MigrationTarget: heir})}
}

// use makes a request as a front end does.
func (c relay) use(write bool) bool {
	if !c.ClaimFor(c.d, write) {
		return false
	}
	require.NoError(c.t, c.FirstUse(c.d))
	c.s.KeepOwner(c.d)
	require.True(c.t, c.Admitted(c.d))
	return true
}

func (c relay) reads() bool  { return c.use(false) }
func (c relay) writes() bool { return c.use(true) }

// TestIncarnations: one of the clients of a name has the disk. Another one waits until it is gone,
// and then the first one is over, also after a restart.
func TestIncarnations(t *testing.T) {
	r := newRelays(t)
	a := r.relay("a", false)
	require.True(t, a.reads())
	require.Equal(t, Holders{Owner: "cert:vm"}, r.s.Holders(1))
	b := r.relay("b", false)
	require.False(t, b.reads())
	require.False(t, b.writes())
	require.False(t, b.Admitted(r.d))
	plain := r.relay("", false)
	require.False(t, plain.reads(), "nor has one that is no incarnation")
	a.Detach()
	again := r.relay("a", false)
	require.False(t, b.writes(), "it is connected again")
	require.True(t, again.writes())

	again.Detach()
	var hold rangelock.Hold
	hold.Set(rangelock.Write, again.Name(), 0, 512)
	r.d.Ranges.Lock(&hold)
	require.False(t, b.writes(), "a write of the former one is still in the disk")
	r.d.Ranges.Unlock(&hold)
	require.True(t, b.reads())
	for range 2 {
		late := r.relay("a", true)
		require.False(t, late.reads())
		require.False(t, late.writes())
		require.True(t, late.Superseded(r.d))
		require.True(t, r.d.Superseded("cert:vm", "a"))
		require.False(t, r.d.Superseded("cert:vm", "b"))
		require.True(t, late.Fenced(r.d))
		r.restart()
	}
	require.True(t, r.relay("b", false).writes())
}

// TestHeir: the target of a migration reads beside the source, and has the disk from its first
// write on. The source then is over.
func TestHeir(t *testing.T) {
	for name, restart := range map[string]bool{"one run": false, "restarts between": true} {
		t.Run(name, func(t *testing.T) {
			r := newRelays(t)
			source, target := r.relay("a", false), r.relay("b", true)
			require.True(t, target.reads(), "nobody has it yet")
			require.Empty(t, r.s.Holders(1).Owner, "a look at it is no claim")
			require.True(t, source.writes())
			between := func() {
				if restart {
					r.restart()
					source, target = r.relay("a", false), r.relay("b", true)
				}
			}
			between()
			require.True(t, target.reads())
			require.True(t, source.writes())
			require.True(t, target.reads())
			require.False(t, r.relay("c", false).reads(), "a client that is no heir")

			flushes := r.content.Calls(disktest.OpFlush)
			require.True(t, target.writes())
			require.Equal(t, flushes+1, r.content.Calls(disktest.OpFlush),
				"what the source was told is written is durable")
			require.True(t, target.writes())
			between()
			require.False(t, source.writes())
			require.False(t, source.reads())
			require.True(t, source.Superseded(r.d))
			require.True(t, target.writes())
			target.Detach()
			require.False(t, source.writes())

			third := r.relay("d", true)
			require.True(t, third.writes(), "and on to another machine")
			require.False(t, r.relay("b", true).writes())
		})
	}
}

// TestHeirThatIsCancelled: the source goes on. A later migration ends the claim of the first.
func TestHeirThatIsCancelled(t *testing.T) {
	r := newRelays(t)
	source, first := r.relay("a", false), r.relay("b", true)
	require.True(t, source.writes())
	require.True(t, first.reads())
	second := r.relay("c", true)
	require.True(t, second.reads())
	require.True(t, source.writes())
	require.True(t, second.writes())
	require.False(t, first.writes())
	require.False(t, source.writes())

	// The source is started anew during a migration: the heir stays one.
	r = newRelays(t)
	source, heir := r.relay("a", false), r.relay("b", true)
	require.True(t, source.writes())
	require.True(t, heir.reads())
	source.Detach()
	source = r.relay("a2", false)
	require.True(t, source.writes())
	require.True(t, heir.writes())
	require.False(t, source.writes())
}

// TestHeirWithoutAStore: if it cannot be saved who is over, nothing changes.
func TestHeirWithoutAStore(t *testing.T) {
	r := newRelays(t)
	source, target := r.relay("a", false), r.relay("b", true)
	require.True(t, source.writes())
	r.store.broken = errors.New("no space")
	require.False(t, target.writes())
	require.True(t, source.writes())
	r.store.broken = nil
	require.True(t, target.writes())
	require.False(t, source.writes())
}

// TestIncarnationsAndHandovers: a handover is between names, whatever incarnations they have.
func TestIncarnationsAndHandovers(t *testing.T) {
	r := newRelays(t)
	source, target := r.relay("a", false), r.relay("b", true)
	require.True(t, source.writes())
	require.ErrorContains(t, r.s.Admit(1, "cert:vm", time.Time{}), "belongs to cert:vm")
	require.NoError(t, r.s.Admit(1, "cert:other", time.Time{}))
	require.True(t, target.writes())
	require.Equal(t, Holders{Owner: "cert:vm", Guest: "cert:other"}, r.s.Holders(1),
		"it stays open")
	require.ErrorIs(t, testtool.Err(r.s.HandOver(1)), ErrNotLoggedIn)
	other := relay{r, r.s.AttachTo(r.d, Who{Name: "cert:other", Incarnation: "o"})}
	require.True(t, other.writes())
	require.Equal(t, "cert:vm", testtool.Must(r.s.HandOver(1))(t))
	require.Equal(t, Holders{Owner: "cert:other", Fenced: []string{"cert:vm"}}, r.s.Holders(1))
	require.False(t, target.writes())
	require.False(t, r.relay("c", true).writes(), "the name is fenced")
	require.False(t, target.Superseded(r.d), "the name may be admitted again")
	require.NoError(t, r.s.Admit(1, "cert:vm", time.Time{}))
	require.Equal(t, Holders{Owner: "cert:other", Guest: "cert:vm"}, r.s.Holders(1),
		"it is fenced no longer")
	require.True(t, target.writes())
	require.True(t, source.Superseded(r.d))
	r.restart()
	require.Equal(t, "cert:other", r.s.Holders(1).Owner)
	require.Equal(t, "cert:vm", r.s.Holders(1).Guest)
}

// TestRestartDuringAHandover: a client of the owner's name that is started anew has the disk as the
// former one had it, while the disk is open to another one, too.
func TestRestartDuringAHandover(t *testing.T) {
	r := newRelays(t)
	source, other := r.relay("a", false), relay{r, r.s.Attach("iqn.other")}
	require.True(t, source.writes())
	require.NoError(t, r.s.Admit(1, "iqn.other", time.Time{}))
	require.True(t, other.writes())
	again := r.relay("b", false)
	require.False(t, again.reads(), "the former one is still there")
	source.Detach()
	require.True(t, again.reads())
	require.True(t, again.writes())
	require.True(t, other.writes())
	require.False(t, r.relay("a", false).writes())
	require.False(t, relay{r, r.s.Attach("iqn.third")}.reads())
	require.Equal(t, "cert:vm", testtool.Must(r.s.HandOver(1))(t))
	require.False(t, again.writes())
	require.True(t, other.writes())
}

// TestOverIsBounded starts a client again and again.
func TestOverIsBounded(t *testing.T) {
	s := &handoverState{Guest: "iqn.guest"}
	for i := range maxOver + 10 {
		s = s.ended(outcome{owner: "cert:vm x", superseded: fmt.Sprintf("cert:vm %d", i)})
	}
	require.Len(t, s.Superseded, maxOver)
	require.Equal(t, "cert:vm 10", s.Superseded[0])
	require.Equal(t, "iqn.guest", s.Guest)
	require.True(t, s.valid())
	require.False(t, s.superseded("cert:vm 9"))
	require.True(t, s.superseded("cert:vm 10"))
	_, d := served(t, func(o *Options) { o.Access = AccessWriteShared })
	d.handover.Store(s)
	require.False(t, d.Superseded("cert:vm", "10"), "a shared disk is for everybody")
}

// TestHandOverToTheLastIncarnation: of several clients of the name that a disk is handed over to,
// it goes to the last one that has come to this disk, whatever they call themselves.
func TestHandOverToTheLastIncarnation(t *testing.T) {
	r := newRelays(t)
	first := relay{r, r.s.Attach("iqn.first")}
	require.True(t, first.writes())
	require.NoError(t, r.s.Admit(1, "cert:vm", time.Time{}))
	elsewhere := &Disk{}
	r.relay("z", false)
	r.relay("a", false)
	last := r.relay("m", false)
	r.s.AttachTo(elsewhere, Who{Name: "cert:vm", Incarnation: "y"})
	require.NoError(t, testtool.Err(r.s.HandOver(1)))
	require.True(t, last.Owns(r.d))
	require.True(t, last.writes())
	require.False(t, first.writes())
}

// TestHandOverNeedsOneAtTheDisk: a client that goes by the name at another disk only has no use for
// this one.
func TestHandOverNeedsOneAtTheDisk(t *testing.T) {
	r := newRelays(t)
	require.True(t, relay{r, r.s.Attach("iqn.first")}.writes())
	require.NoError(t, r.s.Admit(1, "cert:vm", time.Time{}))
	r.s.AttachTo(&Disk{}, Who{Name: "cert:vm", Incarnation: "y"})
	require.ErrorIs(t, testtool.Err(r.s.HandOver(1)), ErrNotLoggedIn)
}

// quietLine is the line of a peer that stays.
type quietLine struct{ looks atomic.Int64 }

func (l *quietLine) HungUp() bool { l.looks.Add(1); return false }
func (*quietLine) End(error)      {}
func (*quietLine) AwaitRequests() {}

// TestCrowdOfRequests: of many requests of a client whose disk another one of its name has, one
// looks whether that is about to end, and not each of them.
func TestCrowdOfRequests(t *testing.T) {
	s, d := served(t)
	line := new(quietLine)
	join := func() *Client {
		return s.AttachTo(d, Who{Name: "tcp:a", Crowd: true, Line: line})
	}
	former, next := join(), join()
	require.NoError(t, former.Begin(d, true))
	defer d.End()
	const requests = 400
	errs := make(chan error, requests)
	for range requests {
		go func() { errs <- next.Begin(d, true) }()
	}
	for range requests {
		require.ErrorContains(t, <-errs, "another process")
	}
	require.Less(t, line.looks.Load(), int64(4*requests))
}
