// Package vhosttest stands for a guest and its QEMU: it is a front end of vhost-user with a driver
// of virtio-blk, for tests and measurements of a back end. It can also misbehave.
//
// It has these layers. Each uses those before:
//
//	Conn      one connection: sends any message, with any files, sizes and flags
//	Memory    the guest's memory: regions with a memfd each, plugged in and out
//	Queue     a split ring: puts any chain of descriptors into it, also one that lies
//	Driver    negotiation, configuration, requests, rings that stop and go on, a back end that
//	          starts again, the log of a migration
//	Stream    a ring full of equal requests, without allocation, to measure
//
// The driver checks what the back end does to its memory: what it says it has used, how much it
// wrote, whether a status is there. The call that meets a violation returns ErrViolation.
//
// Sources: QEMU's docs/interop/vhost-user, virtio 1.2 sections 2.7 (split rings) and 5.2 (block
// device). In the order of messages it follows QEMU's hw/virtio/vhost-user.c. Machines are little
// endian, as the driver is only for those.
package vhosttest

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Options describe the guest. The zero value is a guest with one queue, that uses all it knows.
type Options struct {
	Features         uint64 // which to take if offered; 0: all that are known; None
	ProtocolFeatures uint64 // the same

	Queues    int    // 0: 1
	QueueSize uint16 // a power of 2, at least 2; 0: 128

	Memory  uint64          // bytes, in one region; 0: 64 MiB
	Regions []RegionOptions // in place of Memory
	// Unsealed leaves out the seals of the guest's memory. Regions have their own setting.
	Unsealed bool

	Layout  Layout        // of requests that say nothing else
	Timeout time.Duration // for each answer and each request; 0: DefaultTimeout

	// Quiet leaves out the kick that QEMU gives a ring that starts.
	Quiet bool
	// NoStart stops after the negotiation: no memory is shared, and no ring starts. Start does
	// that.
	NoStart bool
	// KeepInflight gives another driver of the guest the region of requests in flight of the one
	// before. QEMU does not, and Cloud Hypervisor does.
	KeepInflight bool
}

// regionAddr is where the first region is. 0 is an address too, but finds fewer mistakes.
const regionAddr = 1 << 30

// Driver is a guest with a disk. Its methods may be called by several goroutines, unless they say
// otherwise.
type Driver struct {
	Offered         uint64 // features of the back end
	OfferedProtocol uint64
	Features        uint64 // negotiated
	Protocol        uint64
	MaxQueues       int // of the back end; 0: it does not say
	MaxSlots        int // of memory; 0: it does not say

	Memory Memory

	o        Options
	mu       sync.Mutex // guards conn and closed
	conn     *Conn
	closed   bool
	queues   []*Queue
	back     *backChannel
	inflight *Inflight
	log      *Log
	changes  chan struct{}
}

// Dial connects to a back end, negotiates, shares the memory and starts the rings.
func Dial(path string, o Options) (_ *Driver, err error) {
	o.Queues = cmp.Or(o.Queues, 1)
	o.QueueSize = cmp.Or(o.QueueSize, 128)
	o.Memory = cmp.Or(o.Memory, 64<<20)
	o.Timeout = cmp.Or(o.Timeout, DefaultTimeout)
	if o.Regions == nil {
		o.Regions = []RegionOptions{{Addr: regionAddr, Size: o.Memory, Unsealed: o.Unsealed}}
	}
	if o.QueueSize < 2 || o.QueueSize&(o.QueueSize-1) != 0 {
		return nil, fmt.Errorf("a queue of %d descriptors: must be a power of 2", o.QueueSize)
	}
	d := &Driver{o: o, changes: make(chan struct{}, 1)}
	defer func() {
		if err != nil {
			_ = d.Close()
		}
	}()
	for _, options := range o.Regions {
		r, err := newRegion(options)
		if err != nil {
			return nil, err
		}
		d.Memory.add(r)
	}
	for i := range o.Queues {
		q, err := newQueue(d, i, o.QueueSize)
		if err != nil {
			return nil, err
		}
		d.queues = append(d.queues, q)
	}
	if err := d.connect(path); err != nil {
		return nil, err
	}
	if o.NoStart {
		return d, nil
	}
	return d, d.Start()
}

// masked is what is taken of an offer.
func masked(offered, known, mask uint64) uint64 {
	mask = cmp.Or(mask, ^uint64(0))
	return offered & known & mask
}

// connect makes a connection and negotiates. The features that the guest has stay: a back end that
// offers less is refused, as QEMU does it. Protocol features are QEMU's own, and are agreed anew.
func (d *Driver) connect(path string) (err error) {
	c, err := DialConn(path, d.o.Timeout)
	if err != nil {
		return err
	}
	again := d.conn != nil
	d.mu.Lock()
	d.conn = c
	d.mu.Unlock()
	if d.Offered, err = c.number(GetFeatures); err != nil {
		return err
	}
	features := masked(d.Offered, known, d.o.Features)
	var protocol uint64
	if d.Offered&FeatureProtocolFeatures != 0 {
		if d.OfferedProtocol, err = c.number(GetProtocolFeatures); err != nil {
			return err
		}
		protocol = masked(d.OfferedProtocol, knownProtocol, d.o.ProtocolFeatures)
		if err := c.Tell(SetProtocolFeatures, U64(protocol)); err != nil {
			return err
		}
	}
	if again && features&d.Features != d.Features {
		return fmt.Errorf("%w: the guest has features %#x, but the back end offers %#x now",
			ErrUnsupported, d.Features, d.Offered)
	}
	if !again {
		d.Features = features
	}
	d.Protocol = protocol
	c.ack = d.Protocol&ProtocolReplyAck != 0
	if d.Protocol&ProtocolMQ != 0 {
		n, err := c.number(GetQueueNum)
		if err != nil {
			return err
		}
		d.MaxQueues = int(n)
		if len(d.queues) > d.MaxQueues {
			return fmt.Errorf("%w: %d queues, the back end has %d", ErrUnsupported,
				len(d.queues), d.MaxQueues)
		}
	}
	if d.Protocol&ProtocolBackendReq != 0 {
		if err := d.openBackChannel(); err != nil {
			return err
		}
	}
	if d.Protocol&ProtocolMemSlots != 0 {
		n, err := c.number(GetMaxMemSlots)
		if err != nil {
			return err
		}
		d.MaxSlots = int(n)
	}
	return c.Tell(SetOwner, nil)
}

// Start shares the memory and starts all rings, as a guest's driver does when it loads.
func (d *Driver) Start() error { return d.start((*Queue).base) }

// start starts all rings, each at a position.
func (d *Driver) start(base func(*Queue) uint16) error {
	features := d.Features
	if d.log != nil {
		features |= FeatureLogAll
	}
	if err := d.Conn().Tell(SetFeatures, U64(features)); err != nil {
		return err
	}
	if d.Protocol&ProtocolInflight != 0 {
		if err := d.shareInflight(); err != nil {
			return err
		}
	}
	if err := d.status(statusAcknowledge | statusDriver | statusFeaturesOK); err != nil {
		return err
	}
	if err := d.ShareMemory(); err != nil {
		return err
	}
	if d.log != nil {
		if err := d.log.share(d.Conn()); err != nil {
			return err
		}
	}
	for _, q := range d.queues {
		if err := q.Resume(base(q)); err != nil {
			return err
		}
	}
	return d.status(statusAcknowledge | statusDriver | statusFeaturesOK | statusDriverOK)
}

// Device status (virtio 1.2, section 2.1).
const (
	statusAcknowledge = 1
	statusDriver      = 2
	statusDriverOK    = 4
	statusFeaturesOK  = 8
)

// status sets the status of the device if the back end wants it, and checks that it holds.
func (d *Driver) status(want uint64) error {
	if d.Protocol&ProtocolStatus == 0 {
		return nil
	}
	if err := d.Conn().Tell(SetStatus, U64(want)); err != nil {
		return err
	}
	got, err := d.Conn().number(GetStatus)
	if err == nil && got&want != want {
		err = fmt.Errorf("%w: the status is %#x after %#x was set", ErrViolation, got, want)
	}
	return err
}

// Status asks for the status of the device (virtio 1.2, section 2.1).
func (d *Driver) Status() (uint64, error) { return d.Conn().number(GetStatus) }

// Reset resets the device (RESET_DEVICE). All rings are stopped then; Start starts it again.
func (d *Driver) Reset() error {
	if d.Protocol&ProtocolReset == 0 {
		return fmt.Errorf("RESET_DEVICE: %w", ErrUnsupported)
	}
	if err := d.Conn().Tell(ResetDevice, nil); err != nil {
		return err
	}
	d.renew()
	return nil
}

// renew empties the rings, as another driver of the guest does.
func (d *Driver) renew() {
	for _, q := range d.queues {
		q.reset()
	}
	if d.inflight != nil && !d.o.KeepInflight {
		d.inflight.close()
		d.inflight = nil
	}
}

// Renew starts the device for another driver of the guest, as Cloud Hypervisor does: the rings are
// disabled, and stopped or not, but the device is not reset.
func (d *Driver) Renew(stop bool) error {
	for _, q := range d.queues {
		if err := q.Enable(false); err != nil {
			return err
		}
		if stop {
			if _, err := q.Stop(); err != nil {
				return err
			}
		}
	}
	d.renew()
	return d.Start()
}

// Conn is the connection, to send messages by hand.
func (d *Driver) Conn() *Conn {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.conn
}

// Queue returns a queue; the first is 0.
func (d *Driver) Queue(i int) *Queue { return d.queues[i] }

// Queues is how many queues there are.
func (d *Driver) Queues() int { return len(d.queues) }

// Close closes the connection without a word, as a QEMU that is killed does, and gives up the
// memory. No other method may run. Requests under way fail. Only the first call does something.
func (d *Driver) Close() (err error) {
	d.mu.Lock()
	c, closed := d.conn, d.closed
	d.closed = true
	d.mu.Unlock()
	if closed {
		return nil
	}
	if c != nil {
		if err = c.Close(); errors.Is(err, net.ErrClosed) {
			err = nil // Reconnect has failed
		}
	}
	d.closeBackChannel()
	for _, q := range d.queues {
		q.close()
	}
	for _, r := range d.Memory.Regions() {
		d.Memory.remove(r)
		r.close()
	}
	if d.inflight != nil {
		d.inflight.close()
	}
	if d.log != nil {
		d.log.close()
	}
	return err
}

// Shutdown stops all rings as QEMU does when a guest is shut down, and closes the connection.
func (d *Driver) Shutdown() (err error) {
	for _, q := range d.queues {
		_, stopped := q.Stop()
		err = errors.Join(err, stopped)
	}
	if err == nil {
		err = d.status(0)
	}
	return errors.Join(err, d.Close())
}

// eventfd makes an eventfd. Reads of it block.
func eventfd() (int, error) { return unix.Eventfd(0, unix.EFD_CLOEXEC) }
