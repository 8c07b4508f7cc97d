package vhostuser

import (
	"encoding/binary"
	"errors"
	"fmt"

	"kubevirt.io/disk/disk"
)

// Features, virtio 1.2, sections 5.2.3 and 6. FeatureLogAll and featureProtocol are vhost-user's.
const (
	featureSegMax      = 1 << 2
	featureReadOnly    = 1 << 5
	featureBlockSize   = 1 << 6
	featureFlush       = 1 << 9
	featureTopology    = 1 << 10
	featureConfigWCE   = 1 << 11
	featureMQ          = 1 << 12
	featureDiscard     = 1 << 13
	featureWriteZeroes = 1 << 14
	featureLogAll      = 1 << 26
	featureIndirect    = 1 << 28
	featureEventIdx    = 1 << 29
	featureProtocol    = 1 << 30
	featureVersion1    = 1 << 32
)

const (
	// segMax is the most segments of data in a request: with header and status as many as QEMU's
	// default ring has descriptors.
	segMax = 126
	// configSize is the size of the configuration, in bytes. configWCE is the offset of the byte
	// that turns the write cache on and off.
	configSize = 60
	configWCE  = 32
	maxConfig  = 256
	// configAlso is the offset at which Cloud Hypervisor before 2026 asks for the configuration. It
	// is the offset in virtio's MMIO; by the protocol it would be 0.
	configAlso = 0x100
)

// offered are the features of the device.
func (c *conn) offered() uint64 {
	f := uint64(featureSegMax | featureBlockSize | featureFlush | featureTopology |
		featureConfigWCE | featureMQ | featureLogAll | featureIndirect | featureEventIdx |
		featureProtocol | featureVersion1)
	d := c.disk
	if d.Protected() {
		return f | featureReadOnly
	}
	if d.Discards != nil {
		f |= featureDiscard
	}
	if d.Zeroes != nil {
		f |= featureWriteZeroes
	}
	return f
}

// config is the configuration space, virtio 1.2, section 5.2.4.
func (c *conn) config() (b [maxConfig]byte) {
	d := c.disk
	put16, put32 := binary.LittleEndian.PutUint16, binary.LittleEndian.PutUint32
	binary.LittleEndian.PutUint64(b[:], uint64(d.Size()/disk.SectorSize))
	put32(b[12:], segMax)
	put32(b[20:], uint32(d.BlockSize))
	const page = 4096 // the page cache's unit: a smaller write may have to read first
	for size := d.BlockSize; size < page; size *= 2 {
		b[24]++ // logical blocks in a physical one, as a power of two
	}
	put16(b[26:], uint16(page/d.BlockSize))
	if c.writeThrough.Load()&throughOff == 0 {
		b[configWCE] = 1
	}
	put16(b[34:], maxQueues)
	if d.Discards != nil {
		put32(b[36:], maxRangeSectors)
		put32(b[40:], maxRanges)
		put32(b[44:], page/disk.SectorSize)
	}
	if d.Zeroes != nil {
		put32(b[48:], maxRangeSectors)
		put32(b[52:], maxRanges)
		b[56] = 1 // zeroing a range may give its space back
	}
	return b
}

// handle executes a message. An error ends the connection.
func (c *conn) handle(m *message) error {
	reply, fd, err := c.execute(m)
	switch {
	case err != nil:
		if c.acknowledges(m) {
			_ = c.reply(m, binary.LittleEndian.AppendUint64(nil, 1), -1)
		}
		return err
	case reply != nil:
		return c.reply(m, reply, fd)
	case c.acknowledges(m):
		return c.reply(m, binary.LittleEndian.AppendUint64(nil, 0), -1)
	}
	return nil
}

func (c *conn) acknowledges(m *message) bool {
	return m.flags&flagNeedReply != 0 && c.protocol&protocolReplyAck != 0
}

func (c *conn) reply(m *message, payload []byte, fd int) error {
	err := send(c.nc, m.request, flagReply, payload, fd)
	closeFD(fd)
	return err
}

func number(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n) }

// execute executes a message. It returns the reply, if the message has one of its own, and a
// descriptor to send with it.
func (c *conn) execute(m *message) (reply []byte, fd int, err error) {
	switch m.request {
	case reqGetFeatures:
		return number(c.offered()), -1, nil
	case reqGetProtocolFeatures:
		return number(protocolFeatures), -1, nil
	case reqGetQueueNum:
		return number(maxQueues), -1, nil
	case reqGetMaxMemSlots:
		return number(maxRegions), -1, nil
	case reqGetStatus:
		return number(c.status), -1, nil
	case reqGetConfig:
		reply, err = c.getConfig(m)
		return reply, -1, err
	case reqGetVringBase:
		reply, err = c.getBase(m)
		return reply, -1, err
	case reqGetInflightFD:
		return c.getInflight(m)
	case reqSetLogBase:
		fd := m.take(0)
		defer closeFD(fd)
		// QEMU takes any reply. Front ends with rust-vmm's library wait for the payload that they
		// sent.
		return m.payload, -1, c.dirty.set(m.payload, fd)
	}
	return nil, -1, c.set(m)
}

// set executes a message without a reply of its own.
func (c *conn) set(m *message) error {
	switch m.request {
	case reqSetOwner, reqSetLogFD:
		return nil // the connection owns the device, and changes of the log need no message
	case reqResetOwner, reqResetDevice:
		c.reset()
		return nil
	case reqSetFeatures:
		return c.setFeatures(m)
	case reqSetProtocolFeatures:
		return c.setProtocol(m)
	case reqSetStatus:
		return c.setStatus(m)
	case reqSetConfig:
		return c.setConfig(m)
	case reqSetBackendReqFD:
		c.setBack(m.take(0))
		return nil
	case reqSetMemTable, reqAddMemReg, reqRemMemReg:
		return c.setMemory(m)
	case reqSetInflightFD:
		return c.setInflight(m)
	case reqSetVringNum, reqSetVringAddr, reqSetVringBase, reqSetVringEnable, reqSetVringKick,
		reqSetVringCall, reqSetVringErr:
		return c.setRing(m)
	}
	return fmt.Errorf("message %d is not known here", m.request)
}

func (c *conn) setFeatures(m *message) error {
	n, err := m.u64()
	if err != nil {
		return err
	}
	// The write protection may have changed since the guest's last notice.
	known := c.offered() | featureReadOnly | featureDiscard | featureWriteZeroes
	if extra := n &^ known; extra != 0 {
		return fmt.Errorf("the client wants features that were not offered: %#x", extra)
	}
	c.features = n
	c.dirty.wanted.Store(n&featureLogAll != 0)
	c.setWriteThrough(throughUnable, n&featureFlush == 0)
	for _, q := range c.queues {
		if q != nil && n&featureProtocol == 0 {
			if err := q.enable(true); err != nil {
				return err
			}
		}
	}
	return nil
}

// Why a write must be durable when it ends: the driver relies on that, or may do so. The first two
// are also kept in the region of requests in flight.
const (
	throughOff = 1 << 63 // the driver has turned the write cache off
	// throughMaybe: the guest has come from elsewhere, and front ends do not say what it has done
	// there. It ends when the driver flushes: then the driver believes that there is a write cache.
	throughMaybe  = 1 << 62
	throughUnable = 1 // the driver cannot flush
)

func (c *conn) setWriteThrough(why uint64, on bool) {
	if on {
		c.writeThrough.Or(why)
	} else {
		c.writeThrough.And(^why)
	}
	c.region.setWriteThrough(why, on)
}

// setStatus sets the status of the device. When the driver is ready, the front end waits for no
// more answers about rings. So it is told then if the disk has another size than the one that it
// has read. The size can have changed while no front end was connected or the rings stood still.
func (c *conn) setStatus(m *message) error {
	const driverOK = 4
	n, err := m.u64()
	if err != nil {
		return err
	}
	c.status = n
	switch {
	case n == 0:
		c.reset()
	case n&driverOK != 0 && c.sizeRead != uint64(c.disk.Size()/disk.SectorSize):
		c.resized()
	}
	return nil
}

func (c *conn) setProtocol(m *message) error {
	n, err := m.u64()
	if err != nil {
		return err
	}
	if extra := n &^ protocolFeatures; extra != 0 {
		return fmt.Errorf("the client wants features of the protocol that were not offered: %#x",
			extra)
	}
	c.protocol = n
	return nil
}

// reset stops all rings. They begin at 0 unless the front end says otherwise. Their positions are
// kept for GET_VRING_BASE: QEMU 7.2 asks for them after it has reset the status, and migrates a
// guest with the answer.
func (c *conn) reset() {
	for _, q := range c.queues {
		if q != nil {
			q.halt()
			q.forgetKick()
			q.fromZero, q.wasReset = true, true
			q.enabled = c.features&featureProtocol == 0
		}
	}
}

func (c *conn) getConfig(m *message) ([]byte, error) {
	if len(m.payload) < 12 {
		return nil, m.wrongSize()
	}
	off, size := binary.LittleEndian.Uint32(m.payload), binary.LittleEndian.Uint32(m.payload[4:])
	if off == configAlso {
		off = 0
	}
	if off > maxConfig || size > maxConfig-off || len(m.payload) != 12+int(size) {
		return []byte{}, nil // the protocol's way to say that there is no such range
	}
	config := c.config()
	if off == 0 && size >= 8 {
		c.sizeRead = binary.LittleEndian.Uint64(config[:])
	}
	return append(m.payload[:12:12], config[off:off+size]...), nil
}

// setConfig turns the write cache on or off. No other part of the configuration can be written.
func (c *conn) setConfig(m *message) error {
	if len(m.payload) != 13 || binary.LittleEndian.Uint32(m.payload) != configWCE ||
		binary.LittleEndian.Uint32(m.payload[4:]) != 1 {
		return errors.New("the client wants to write a part of the configuration that only the " +
			"device can")
	}
	c.known = true
	c.setWriteThrough(throughOff, m.payload[12] == 0)
	c.setWriteThrough(throughMaybe, false)
	return nil
}

func (c *conn) getInflight(m *message) ([]byte, int, error) {
	_, _, queues, num, err := parseInflight(m.payload)
	if err != nil {
		return nil, -1, err
	}
	fd, size, err := newInflight(queues, num)
	if err != nil {
		return nil, -1, err
	}
	// The client keeps the region, and sends it by SET_INFLIGHT_FD.
	reply := binary.LittleEndian.AppendUint64(nil, size)
	reply = binary.LittleEndian.AppendUint64(reply, 0)
	reply = binary.LittleEndian.AppendUint16(reply, queues)
	reply = binary.LittleEndian.AppendUint16(reply, num)
	reply = append(reply, make([]byte, len(m.payload)-len(reply))...)
	return reply, fd, nil
}

func (c *conn) setInflight(m *message) error {
	size, off, queues, num, err := parseInflight(m.payload)
	if err != nil {
		return err
	}
	for _, q := range c.queues {
		if q != nil && q.running {
			return errors.New("the region of requests in flight comes while a ring runs")
		}
	}
	fd := m.take(0)
	defer closeFD(fd)
	region, err := openInflight(fd, size, off, queues, num)
	if err != nil {
		return err
	}
	// A write-protected disk may get a new identity with the same content.
	if err := region.claim(c.disk); err != nil && !c.disk.Protected() {
		region.close()
		return err
	}
	c.region.close()
	c.region = region
	through, known := region.adopt(c.writeThrough.Load())
	c.known = c.known || known
	c.setWriteThrough(throughOff, through&throughOff != 0)
	c.setWriteThrough(throughMaybe, through&throughMaybe != 0)
	return nil
}

// queue returns the queue of an index. The first call makes it.
func (c *conn) queue(index uint32) (*queue, error) {
	if index >= maxQueues {
		return nil, fmt.Errorf("there is no ring %d: a disk has %d", index, maxQueues)
	}
	if c.queues[index] == nil {
		q := &queue{c: c, index: int(index), kick: -1, sleeper: sleeper{epoll: -1, wake: -1}}
		q.enabled = c.features&featureProtocol == 0
		if err := q.remap(c.table); err != nil {
			return nil, err
		}
		c.queues[index] = q
	}
	return c.queues[index], nil
}

func (c *conn) getBase(m *message) ([]byte, error) {
	index, _, err := m.state()
	if err != nil {
		return nil, err
	}
	q, err := c.queue(index)
	if err != nil {
		return nil, err
	}
	if err := c.pause(q); err != nil {
		return nil, err
	}
	q.forgetKick()
	reply := binary.LittleEndian.AppendUint32(nil, index)
	return binary.LittleEndian.AppendUint32(reply, uint32(q.ring.next)), nil
}

// pause stops a ring that may go on later, here or elsewhere.
func (c *conn) pause(q *queue) error {
	c.known = c.known || q.running // a guest that has run here has not come from elsewhere
	q.halt()
	return c.settle()
}

// settle makes changes since the last time durable, as QEMU does with its own disks when a machine
// stops. The machine may go on elsewhere: then the server there flushes for it, and does not know
// of writes that were acknowledged here and are not durable yet.
func (c *conn) settle() error {
	done := c.commands.Load()
	if done == c.settled || !c.client.Used(c.disk) {
		return nil
	}
	if err := c.client.Begin(c.disk, false); err != nil {
		return err
	}
	defer c.disk.End()
	if err := c.disk.Disk.Flush(); err != nil {
		return fmt.Errorf("the machine stops, and what it has written is not durable: %w", err)
	}
	c.settled = done
	return nil
}

// setRing sets a property of a ring. Its length and its position can change only while it is
// stopped.
func (c *conn) setRing(m *message) error {
	switch m.request {
	case reqSetVringAddr:
		return c.setAddress(m)
	case reqSetVringKick, reqSetVringCall, reqSetVringErr:
		return c.setWake(m)
	}
	index, num, err := m.state()
	if err != nil {
		return err
	}
	q, err := c.queue(index)
	switch {
	case err != nil:
		return err
	case m.request == reqSetVringEnable:
		return q.enable(num != 0)
	case q.running:
		return fmt.Errorf("message %d comes while ring %d runs", m.request, index)
	case m.request == reqSetVringNum:
		q.ring.num = num
	default:
		q.wasReset = q.wasReset || q.ring.next != uint16(num)
		q.ring.next, q.fromZero = uint16(num), false
	}
	return nil
}

func (c *conn) setAddress(m *message) error {
	if len(m.payload) != 40 {
		return m.wrongSize()
	}
	u64 := func(off int) uint64 { return binary.LittleEndian.Uint64(m.payload[off:]) }
	q, err := c.queue(binary.LittleEndian.Uint32(m.payload))
	if err != nil {
		return err
	}
	const logged = 1
	return q.address(u64(8), u64(16), u64(24), u64(32),
		binary.LittleEndian.Uint32(m.payload[4:])&logged != 0)
}

// setWake sets an eventfd of a ring. The eventfd of the driver's kicks starts the ring.
func (c *conn) setWake(m *message) error {
	n, err := m.u64()
	if err != nil {
		return err
	}
	q, err := c.queue(uint32(n & 0xff))
	if err != nil {
		return err
	}
	fd := -1
	if n&vringNoFD == 0 {
		if fd = m.take(0); fd < 0 {
			return fmt.Errorf("message %d has no descriptor", m.request)
		}
		if err := checkEventFD(fd); err != nil {
			closeFD(fd)
			return err
		}
	}
	switch {
	case m.request == reqSetVringErr:
		closeFD(fd)
	case m.request == reqSetVringCall && fd < 0:
		q.setCall(nil)
	case m.request == reqSetVringCall:
		q.setCall(newCaller(fd))
	case fd < 0:
		return errors.New("the client wants a ring that is polled, without an eventfd")
	default:
		q.halt()
		q.forgetKick()
		q.kick = fd
		return q.start()
	}
	return nil
}
