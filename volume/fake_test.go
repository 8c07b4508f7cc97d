package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

// fakeDisks are disks of files that nothing serves.
type fakeDisks struct {
	claims map[string]string
	single string // the directory of PlaceRoot; "": there is none

	mu      sync.Mutex
	served  map[uint16]string // guarded by mu; volumes by LUN
	users   []string          // guarded by mu
	opening func() error      // guarded by mu; called by Open, when the file is there
	serving func() error      // guarded by mu; called by Serve
	growing func() error      // guarded by mu; called by Grow instead of growing
	whole   chan struct{}     // guarded by mu; what Ended returns; nil: it is closed
	closing chan struct{}     // guarded by mu; Close waits for it; nil: it does not
	slow    chan struct{}     // guarded by mu; Open waits for it; nil: it does not

	numbers   map[string]uint16         // guarded by mu; of volumes that were entered
	snapshots map[string][]api.Snapshot // guarded by mu; by volume
}

func (f *fakeDisks) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeDisks) Default() (api.Spec, error) { return api.Spec{Size: 1 << 20}, nil }

func (f *fakeDisks) Place(p store.Place) (string, error) {
	dir := map[store.PlaceKind]string{store.PlaceRoot: f.single,
		store.PlaceClaim: f.claims[p.Name], store.PlaceUsageType: f.claims[p.Name]}[p.Kind]
	if dir == "" {
		return "", api.Errorf(api.CodeInvalid, "there is no %q", p.Name)
	}
	return dir, nil
}

func (f *fakeDisks) Single() bool { return f.single != "" }

func (f *fakeDisks) Enter(r store.Record, earlier bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.Name == "vm.raw" && !earlier {
		return api.Errorf(api.CodeInUse, "an image has it")
	}
	f.numbers[r.Name] = r.LUN
	return nil
}

func (f *fakeDisks) TakeNumber(name string, lun uint16) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, taken := range f.numbers {
		if lun == taken || lun == 65 { // an image has it
			return false
		}
	}
	f.numbers[name] = lun
	return true
}

func (f *fakeDisks) Leave(string, bool) []string { return nil }

func (f *fakeDisks) Forget(name string) { f.set(func() { delete(f.numbers, name) }) }

func (f *fakeDisks) Open(ctx context.Context, d Disk) (Opened, error) {
	f.mu.Lock()
	slow := f.slow
	f.mu.Unlock()
	if slow != nil {
		select {
		case <-slow:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	path := filepath.Join(d.Dir, diskName)
	st, err := os.Stat(path)
	if err == nil != d.There {
		return nil, fmt.Errorf("the disk is there: %v, and not %v", d.There, err == nil)
	}
	if err != nil {
		if d.Source != nil && d.Source.Image == "missing" {
			return nil, api.Errorf(api.CodeInvalid, "there is no image")
		}
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			return nil, err
		}
	}
	size := max(d.Size, 512)
	if st != nil {
		size = max(size, st.Size())
	}
	if err := os.Truncate(path, size); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(d.Dir, stateName), nil, 0o600); err != nil {
		return nil, err
	}
	f.mu.Lock()
	opening := f.opening
	whole := f.whole
	f.mu.Unlock()
	if opening != nil {
		if err := opening(); err != nil {
			return nil, err
		}
	}
	if whole == nil {
		whole = make(chan struct{})
		close(whole)
	}
	return &fakeDisk{f: f, d: d, path: path, whole: whole}, nil
}

type fakeDisk struct {
	f     *fakeDisks
	d     Disk
	path  string
	whole chan struct{}
}

func (f *fakeDisks) Waits(from *api.Source, _ time.Time) string { return "for " + from.Reference }

func (d *fakeDisk) BlockSize() int { return max(d.d.BlockSize, 512) }

func (d *fakeDisk) Size() int64 {
	st, err := os.Stat(d.path)
	if err != nil {
		return 0
	}
	return st.Size()
}

func (d *fakeDisk) Identity() (serial, naa string) { return "serial", "3000000000000001" }

func (d *fakeDisk) Serve() error {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	if d.f.serving != nil {
		if err := d.f.serving(); err != nil {
			return err
		}
	}
	if other, taken := d.f.served[d.d.LUN]; taken || d.d.LUN == 0 {
		return fmt.Errorf("LUN %d is already used by %q", d.d.LUN, other)
	}
	d.f.served[d.d.LUN] = d.d.Name
	return nil
}

func (d *fakeDisk) Grow(size int64) error {
	d.f.mu.Lock()
	growing := d.f.growing
	d.f.mu.Unlock()
	if growing != nil {
		return growing()
	}
	return os.Truncate(d.path, size)
}

func (d *fakeDisk) Snapshots() []api.Snapshot {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	return d.f.snapshots[d.d.Name]
}

func (d *fakeDisk) TakeSnapshot(_ context.Context, name string) error {
	if strings.ContainsAny(name, "@ ") {
		return api.Errorf(api.CodeInvalid, "%q is no name", name)
	}
	d.f.set(func() {
		d.f.snapshots[d.d.Name] = append(d.f.snapshots[d.d.Name], api.Snapshot{Name: name})
	})
	return nil
}

func (d *fakeDisk) DeleteSnapshot(_ context.Context, name string) error {
	d.f.set(func() {
		d.f.snapshots[d.d.Name] = slices.DeleteFunc(d.f.snapshots[d.d.Name],
			func(s api.Snapshot) bool { return s.Name == name })
	})
	return nil
}

func (d *fakeDisk) Revert(context.Context, string) error { return nil }

func (d *fakeDisk) Changes(context.Context, string, api.Page) (api.Changes, error) {
	return api.Changes{}, nil
}

func (d *fakeDisk) Ended() <-chan struct{} { return d.whole }

func (d *fakeDisk) Copied() bool {
	select {
	case <-d.whole:
		return true
	default:
		return false
	}
}

func (d *fakeDisk) Failure() error { return nil }

func (d *fakeDisk) Withdraw() (users []string, err error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	if len(d.f.users) > 0 {
		return d.f.users, nil
	}
	d.unserveLocked()
	return nil, nil
}

func (d *fakeDisk) unserveLocked() {
	if d.f.served[d.d.LUN] == d.d.Name {
		delete(d.f.served, d.d.LUN)
	}
}

func (d *fakeDisk) Close(ctx context.Context) error {
	d.f.mu.Lock()
	closing := d.f.closing
	d.unserveLocked()
	d.f.mu.Unlock()
	if closing != nil {
		select {
		case <-closing:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func newFake() *fakeDisks {
	return &fakeDisks{served: map[uint16]string{}, numbers: map[string]uint16{},
		snapshots: map[string][]api.Snapshot{}}
}

// start makes a Manager and loads the volumes of a directory.
func start(t *testing.T, dir string, f *fakeDisks) *Manager {
	t.Helper()
	m := testtool.Must(New(Options{Dir: dir, Disks: f, Max: 40, MaxBytes: 1 << 30}))(t)
	t.Cleanup(func() { _ = m.Close() })
	require.NoError(t, m.Load(t.Context()))
	return m
}

// put makes a volume, or finds it.
func put(t *testing.T, m *Manager, name string, spec api.Spec) Volume {
	t.Helper()
	v, _ := testtool.Must2(m.Put(t.Context(), name, spec))(t)
	return v
}

func get(t *testing.T, m *Manager, name string) Volume {
	t.Helper()
	return testtool.Must(m.Get(name))(t)
}

// filling begins an upload into a volume.
func filling(t *testing.T, m *Manager, name string) *Upload {
	t.Helper()
	fill, _ := testtool.Must2(m.Fill(t.Context(), name, false))(t)
	return fill
}

// refused checks the code of a refusal.
func refused(t *testing.T, code api.Code, err error) *api.Error {
	t.Helper()
	require.Error(t, err)
	e := &api.Error{Code: api.CodeFailed, Message: err.Error()} // as the server has it
	errors.As(err, &e)
	require.Equal(t, code, e.Code, e.Message)
	return e
}

var errFake = errors.New("storage is on fire")

var errStopping = api.Errorf(api.CodeUnavailable, "the server is stopping")
