package scsi

import (
	"bytes"
	"context"
	"encoding/hex"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/rangelock"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// BlockSize is the length of a logical block of the units of most tests, in bytes.
const BlockSize = disk.SectorSize

// memDisk is a disk in memory that notes its calls and fails on demand. It has no optional
// interface.
type memDisk struct {
	size    int64 // even if no disk can have it
	content *disktest.Memory

	mu      sync.Mutex
	calls   map[string]int      // guarded by mu
	fail    map[string]error    // guarded by mu; by method
	enter   func(method string) // called outside mu when a call begins
	written []rangelock.Span    // guarded by mu
}

const memPage = 4096 // the unit in which content is allocated

func newMemDisk(size int64) *memDisk {
	return &memDisk{
		size: size, content: disktest.NewMemory(size), calls: map[string]int{},
		fail: map[string]error{},
	}
}

// begin notes a call of a range of the disk, and returns the error that it has to fail with.
func (m *memDisk) begin(method string, off, length int64) error {
	if m.enter != nil {
		m.enter(method)
	}
	if off < 0 || length < 0 || off > m.size-length {
		panic("disk was given a range beyond its size")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls[method]++
	if m.fail[method] == nil && method == "write" {
		m.written = append(m.written, rangelock.Span{Off: off, Length: length})
	}
	return m.fail[method]
}

func (m *memDisk) count(method string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.calls[method]
}

// reset forgets the calls so far.
func (m *memDisk) reset() {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.calls)
}

func (m *memDisk) failWith(method string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail[method] = err
}

// allocated tells how many pages of the disk are allocated.
func (m *memDisk) allocated() int { return int(m.content.Allocated() / memPage) }

func (m *memDisk) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if err := m.begin("read", off, int64(len(p))); err != nil {
		return 0, err
	}
	return m.content.ReadAt(context.Background(), p, off)
}

func (m *memDisk) WriteAt(ctx context.Context, p []byte, off int64) (int, error) {
	if err := m.begin("write", off, int64(len(p))); err != nil {
		return 0, err
	}
	return m.content.WriteAt(context.Background(), p, off)
}

func (m *memDisk) Flush() error { return m.begin("flush", 0, 0) }
func (m *memDisk) Size() int64  { return m.size }
func (m *memDisk) Close() error { return nil }

// zero is "zero" or "discard".
func (m *memDisk) zero(method string, off, length int64) error {
	if err := m.begin(method, off, length); err != nil {
		return err
	}
	return m.content.Discard(context.Background(), off, length)
}

// thinDisk is a memDisk with the optional interfaces of a thin disk.
type thinDisk struct{ *memDisk }

func (d thinDisk) Discard(ctx context.Context, off, length int64) error {
	return d.zero("discard", off, length)
}
func (d thinDisk) Zero(ctx context.Context, off, length int64) error {
	return d.zero("zero", off, length)
}
func (d thinDisk) Extent(ctx context.Context, off, length int64) (disk.Extent, error) {
	if err := d.begin("extent", off, length); err != nil {
		return disk.Extent{}, err
	}
	// One page at a time, so that callers have to gather.
	return d.content.Extent(context.Background(), off, min(length, memPage-off%memPage))
}

func testIdentity() disk.Identity {
	return disk.Identity{Serial: "0123456789abcdef",
		NAA: [8]byte{0x30, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77}}
}

const testBlocks = 20000 // of every disk, unless a test says otherwise

// bench is a device with LUN 1 on a thin disk and one attached nexus, whose unit attentions are
// gone.
type bench struct {
	t     testing.TB
	d     *Device
	disk  *memDisk
	nexus *Nexus
}

func newBench(t testing.TB, change ...func(*LUN)) *bench {
	t.Helper()
	m := newMemDisk(testBlocks * BlockSize)
	lun := LUN{Number: 1, Disk: thinDisk{m}, Identity: testIdentity(), Access: AccessWriteShared}
	for _, c := range change {
		c(&lun)
	}
	d, err := NewDevice(Options{TargetName: "iqn.2017-01.io.kubevirt:wrapper"}, []LUN{lun})
	require.NoError(t, err)
	b := &bench{t: t, d: d, disk: m}
	b.nexus = b.attach("iqn.a", 0)
	return b
}

func plainDisk(l *LUN)     { l.Disk = l.Disk.(thinDisk).memDisk }
func stored(l *LUN)        { l.Store = &keptStore{} }
func readOnly(l *LUN)      { l.ReadOnly = true }
func exclusive(l *LUN)     { l.Access = AccessWriteExclusive }
func readSharedLUN(l *LUN) { l.Access = AccessReadShared }

// attach makes a nexus without pending unit attentions.
func (b *bench) attach(name string, isid byte) *Nexus {
	n := b.d.Attach(InitiatorPort{Name: name, ISID: [6]byte{isid}})
	n.forgetAttentions()
	return n
}

// forgetAttentions clears the pending unit attentions of the nexus at all units.
func (n *Nexus) forgetAttentions() {
	for i := range *n.slots.Load() {
		if at := n.nth(i); at != nil {
			at.pending.Store(0)
		}
	}
}

// nth is one of the units of the device, in the order of their numbers.
func (d *Device) nth(i int) *unit { return d.luns.Load().units[i] }

// nth is the state of the nexus at one of the first units of the device, in the order of their
// numbers.
func (n *Nexus) nth(i int) *nexusUnit { return (*n.slots.Load())[i].Load() }

const lun1 = uint64(1) << 48

// result is how a command ended.
type result struct {
	status Status
	sense  []byte
	data   []byte
}

// code is the sense key, ASC and ASCQ of fixed format sense data, as "5/24/00"; empty for other
// statuses.
func (r result) code() string {
	if len(r.sense) < 14 {
		return ""
	}
	return strings.ToLower(hex.EncodeToString(r.sense[2:3])[1:] + "/" +
		hex.EncodeToString(r.sense[12:13]) + "/" + hex.EncodeToString(r.sense[13:14]))
}

// outcome is the code, or the status where there is no sense data.
func (r result) outcome() string {
	if c := r.code(); c != "" {
		return c
	}
	return r.status.String()
}

// cdb reads a CDB in hexadecimal, with spaces.
func cdb(s string) []byte { return unhex(s) }

func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		panic(err)
	}
	return b
}

// hang has the calls of one method wait in the disk until goOn is closed; arrived tells of each
// that is there.
func (b *bench) hang(method string) (arrived, goOn chan struct{}) {
	arrived, goOn = make(chan struct{}, 100), make(chan struct{})
	b.disk.enter = func(m string) {
		if m == method {
			arrived <- struct{}{}
			<-goOn
		}
	}
	return arrived, goOn
}

// waitsForRange returns when that many commands wait for a range of the disk.
func (b *bench) waitsForRange(commands int) {
	b.t.Helper()
	r := &b.d.nth(0).Ranges
	waiting := func() bool { return r.State().Waiting == commands }
	testtool.Eventually(b.t, waiting)
}

// run carries out a command on LUN 1 as the transport does; data is what the initiator sends, cut
// off at Length.
func (b *bench) run(cdb []byte, data []byte) result { return b.runAs(b.nexus, lun1, cdb, data) }

func (b *bench) runAs(n *Nexus, lun uint64, cdb []byte, data []byte) result {
	return drive(b.d, n, lun, cdb, data, 8192)
}

// ready, reads and writes are how a TEST UNIT READY, a READ and a WRITE of LUN 1 end.
func (b *bench) ready(n *Nexus) string { return b.runAs(n, lun1, cdb(testReady), nil).outcome() }
func (b *bench) reads(n *Nexus) string { return b.runAs(n, lun1, cdb(readOne), nil).outcome() }
func (b *bench) writes(n *Nexus) string {
	return b.runAs(n, lun1, cdb(writeOne), pattern(1, 1)).outcome()
}

// prepared is a command to LUN 1 that is to be carried out; data is what comes with it.
func (b *bench) prepared(n *Nexus, cdb, data []byte) *Task {
	b.t.Helper()
	t := &Task{Nexus: n, LUN: lun1, Offered: int64(len(data))}
	copy(t.CDB[:], cdb)
	require.NoError(b.t, b.d.Prepare(t))
	return t
}

// drive carries out a command with data in chunks.
func drive(d *Device, n *Nexus, lun uint64, cdb []byte, data []byte, chunk int64) result {
	t := &Task{Nexus: n, LUN: lun, Offered: int64(len(data))}
	copy(t.CDB[:], cdb)
	end := func(err error) result {
		status, sense := d.Outcome(t, err, nil)
		return result{status: status, sense: sense}
	}
	if err := d.Prepare(t); err != nil {
		return end(err)
	}
	var in []byte
	switch t.Dir {
	case DirIn:
		in = bytes.Repeat([]byte{0xee}, int(t.Length))
		for off := int64(0); off < t.Length; off += chunk {
			if err := t.In(off, in[off:min(off+chunk, t.Length)]); err != nil {
				return end(err)
			}
		}
	case DirOut:
		data = data[:min(int64(len(data)), t.Length)]
		if t.Gather {
			chunk = t.Length
		}
		for off := int64(0); off < int64(len(data)); off += chunk {
			if err := t.Out(off, data[off:min(off+chunk, int64(len(data)))]); err != nil {
				return end(err)
			}
		}
	}
	status, err := t.Finish()
	if err != nil {
		return end(err)
	}
	return result{status: status, data: in}
}

// good carries out a command that must succeed, and returns its data.
func (b *bench) good(cdb []byte, data []byte) []byte {
	b.t.Helper()
	r := b.run(cdb, data)
	require.Equal(b.t, "GOOD", r.outcome())
	return r.data
}

// pattern is data of which every block differs.
func pattern(blocks int, seed byte) []byte {
	p := make([]byte, blocks*BlockSize)
	for i := range p {
		p[i] = seed + byte(i) + byte(i>>9)*7
	}
	return p
}

// withdraw is Withdraw where the test knows whom it fences.
func withdraw(d *Device, lun uint16) error {
	_, err := d.disks.Withdraw(lun)
	return err
}

// LUN is a disk as tests describe it.
type LUN = serving.Options

// The access modes.
const (
	AccessWriteExclusive = serving.AccessWriteExclusive
	AccessWriteShared    = serving.AccessWriteShared
	AccessReadShared     = serving.AccessReadShared
)

// storedHandover is the name under which package serving keeps handovers.
const storedHandover = "handover"

// front is a device as the only front end.
type front struct{ *Device }

func (f front) Added(d *serving.Disk) error {
	_, err := f.Take(d)
	return err
}
func (f front) Removed(d *serving.Disk)          { f.Drop(d) }
func (f front) Resized(d *serving.Disk)          { f.Grew(d) }
func (f front) Shared(*serving.Disk)             {}
func (f front) Holders(d *serving.Disk) []string { return f.ReservationHolders(d) }

// NewDevice makes a device with its disks.
func NewDevice(opt Options, luns []LUN) (*Device, error) {
	if opt.Log == nil {
		opt.Log = zap.New(&lateCore{zapcore.NewNopCore()})
	}
	d, err := New(opt, serving.New(serving.Config{Log: opt.Log}))
	if err != nil {
		return nil, err
	}
	if err := d.disks.Serve(front{d}); err != nil {
		return nil, err
	}
	for _, l := range luns {
		if err := d.disks.Add(l); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// lateCore is a log that goes to another core later.
type lateCore struct{ zapcore.Core }

func (c *lateCore) With([]zapcore.Field) zapcore.Core { return c }

// watchedBy has a core get what is logged from now on.
func (d *Device) watchedBy(core zapcore.Core) { d.log.Core().(*lateCore).Core = core }
