package volume

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// Options are the options of a Manager. Dir and Disks are required.
type Options struct {
	Dir      string // of the store; made if it is missing
	Disks    Disks
	Max      int         // volumes at once; 0: no limit
	MaxBytes int64       // of all disks together; 0: no limit
	Log      *zap.Logger // nil: no log
}

// Manager manages the volumes of one directory.
type Manager struct {
	opt   Options
	log   *zap.Logger
	store *store.Store
	save  func(store.Record) error // the store's Save
	ctx   context.Context          // ends with Close
	stop  context.CancelFunc
	work  sync.WaitGroup // in the background

	timeout     time.Duration // see fetchTimeout
	missingPoll time.Duration // how often to check for missing storage

	resolved sync.Map // by resolvedDir: named directories, and their paths without links

	mu      sync.Mutex
	volumes map[string]*volume // guarded by mu
}

// volume is a volume, from before its record is made until after it is removed. Only the holder of
// its turn may change it.
type volume struct {
	name string
	turn chan struct{} // a semaphore of one

	// guarded by Manager.mu
	record  store.Record  // State "": there is none, and others do not see the volume
	saved   *store.Record // the record on storage; nil: unknown, because saving failed
	opened  Opened        // nil: its disk is not open
	failure error         // why it is not served
	upload  *Upload       // nil: no upload is under way
	// fetching is not nil while the disk is being opened in the background.
	fetching *fetching

	reserved int64 // bytes that an upload has reserved
}

// New opens and locks the directory of the volumes, and finds the volumes in it. The directory
// stays locked until Close.
func New(opt Options) (*Manager, error) {
	s, err := store.Open(opt.Dir)
	if err != nil {
		return nil, err
	}
	opt.Log = cmp.Or(opt.Log, zap.NewNop())
	m := &Manager{opt: opt, log: opt.Log, store: s, save: s.Save, volumes: map[string]*volume{},
		timeout: fetchTimeout, missingPoll: missingPoll}
	if err := m.recall(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	m.ctx, m.stop = context.WithCancel(context.Background())
	return m, nil
}

// Close ends the background work and releases the directory. The disks stay open: they belong to
// the daemon.
func (m *Manager) Close() error {
	m.stop()
	m.work.Wait()
	return m.store.Close()
}

// ID identifies the directory of the volumes.
func (m *Manager) ID() string { return m.store.ID() }

// Volume is the state of a volume at the time of the request.
type Volume struct {
	Record      store.Record
	State       api.State
	Serial, NAA string // "": not known yet
	Upload      *api.Progress
	Failure     string
	Waits       string // what the volume waits for, for people; "": nothing
}

// Has reports whether a volume's disk is in the place.
func (m *Manager) Has(p store.Place) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, v := range m.volumes {
		if v.record.State != "" && v.record.Place == p {
			return true
		}
	}
	return false
}

// Get returns a volume.
func (m *Manager) Get(name string) (Volume, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v := m.volumes[name]
	if v == nil || !v.seenLocked() {
		return Volume{}, notFound(name)
	}
	return v.lookLocked(), nil
}

// List returns all volumes, by name.
func (m *Manager) List() []Volume {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]Volume, 0, len(m.volumes))
	for _, v := range m.volumes {
		if v.seenLocked() {
			all = append(all, v.lookLocked())
		}
	}
	slices.SortFunc(all, func(a, b Volume) int {
		return strings.Compare(a.Record.Name, b.Record.Name)
	})
	return all
}

func notFound(name string) error {
	return api.Errorf(api.CodeNotFound, "there is no volume %q", name)
}

// seenLocked reports whether others may see the volume. It is hidden while it is being made.
func (v *volume) seenLocked() bool {
	return v.failure != nil || v.record.State != "" && v.record.State != store.StateMaking
}

func (v *volume) lookLocked() Volume {
	seen := Volume{Record: v.record, State: api.State(v.record.State)}
	if v.upload != nil {
		seen.Upload = v.upload.progress()
	}
	if v.fetching != nil {
		seen.Waits = v.fetching.waits()
	}
	failure := v.failure
	if v.opened != nil {
		seen.Serial, seen.NAA = v.opened.Identity()
		if failure == nil {
			failure = v.opened.Failure()
		}
	}
	if failure != nil {
		seen.State, seen.Failure = api.StateFailed, failure.Error()
	}
	return seen
}

// takeTurn waits for the turn of a volume, which need not exist yet. The caller releases it.
func (m *Manager) takeTurn(ctx context.Context, name string) (*volume, error) {
	for {
		m.mu.Lock()
		v := m.volumes[name]
		if v == nil {
			v = &volume{name: name, turn: make(chan struct{}, 1)}
			m.volumes[name] = v
		}
		m.mu.Unlock()
		select {
		case v.turn <- struct{}{}:
		case <-ctx.Done():
			return nil, api.Errorf(api.CodeBusy, "another operation on the volume %q is running: "+
				"try again", name)
		}
		m.mu.Lock()
		current := m.volumes[name] == v
		m.mu.Unlock()
		if current {
			return v, nil
		}
		<-v.turn // the volume was deleted, and its turn is of no use any more
	}
}

// release ends the turn of a volume.
func (m *Manager) release(v *volume) {
	m.mu.Lock()
	if v.record.State == "" && v.failure == nil {
		delete(m.volumes, v.name)
	}
	m.mu.Unlock()
	<-v.turn
}

// set changes the record of a volume, on storage first. After an error storage may have either
// record, and nothing may be promised before one is saved.
func (m *Manager) set(v *volume, r store.Record) error {
	if v.saved == nil || !reflect.DeepEqual(*v.saved, r) {
		m.noteSaved(v, nil)
		if err := m.save(r); err != nil {
			return fmt.Errorf("the record of the volume %q could not be saved: %w", v.name, err)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	v.record, v.saved = r, &r
	return nil
}

func (m *Manager) noteSaved(v *volume, r *store.Record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v.saved = r
}

// ensureSaved saves the record of a volume again, if an earlier save has failed.
func (m *Manager) ensureSaved(v *volume) error {
	if v.saved != nil {
		return nil
	}
	return m.set(v, v.record)
}

// Totals are numbers about all volumes.
type Totals struct {
	States   map[api.State]int
	Bytes    int64 // of all disks
	Max      int   // 0: no limit
	MaxBytes int64 // 0: no limit
}

// Totals returns the numbers of volumes and bytes, and their limits.
func (m *Manager) Totals() Totals {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := Totals{States: map[api.State]int{}, Max: m.opt.Max, MaxBytes: m.opt.MaxBytes}
	for _, v := range m.volumes {
		if v.seenLocked() {
			t.States[v.lookLocked().State]++
			t.Bytes += v.bytesLocked()
		}
	}
	return t
}

// enter counts a new volume and its size, which may be 0 while it is unknown. It refuses if that
// exceeds a limit, or if another volume has the claim.
func (m *Manager) enter(v *volume, r store.Record) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	count := 0
	for _, o := range m.volumes {
		if o == v || o.record.State == "" {
			continue
		}
		count++
		if o.record.Place == r.Place && r.Place.Kind == store.PlaceClaim {
			return api.Errorf(api.CodeInUse, "the volume %q already uses the claim %q", o.name,
				r.Place.Name)
		}
	}
	if m.opt.Max > 0 && count >= m.opt.Max {
		return api.Errorf(api.CodeLimit, "there are %d volumes, and there may be no more "+
			"(--volumes-max): delete one first", count)
	}
	if err := m.roomLocked(v, r.Size); err != nil {
		return err
	}
	v.record = r
	return nil
}

// size counts a volume with a new size. A size that is not larger is never refused: the limit may
// be lower than when the volume was made.
func (m *Manager) size(v *volume, size int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if size > v.record.Size {
		if err := m.roomLocked(v, size); err != nil {
			return err
		}
	}
	v.record.Size = size
	return nil
}

func (m *Manager) roomLocked(v *volume, size int64) error {
	if m.opt.MaxBytes == 0 {
		return nil
	}
	var others int64
	for _, o := range m.volumes {
		if o != v {
			others += o.bytesLocked()
		}
	}
	if size > m.opt.MaxBytes-others {
		return api.Errorf(api.CodeLimit, "a volume of %d bytes is too large: the others have %d, "+
			"and all together may have %d (--volumes-max-bytes)", size, others, m.opt.MaxBytes)
	}
	return nil
}

// bytesLocked is how many bytes the volume counts for.
func (v *volume) bytesLocked() int64 { return max(v.record.Size, v.reserved) }
