package vhostuser

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Requests of the front end, as QEMU's docs/interop/vhost-user numbers them.
const (
	reqGetFeatures         = 1
	reqSetFeatures         = 2
	reqSetOwner            = 3
	reqResetOwner          = 4
	reqSetMemTable         = 5
	reqSetLogBase          = 6
	reqSetLogFD            = 7
	reqSetVringNum         = 8
	reqSetVringAddr        = 9
	reqSetVringBase        = 10
	reqGetVringBase        = 11
	reqSetVringKick        = 12
	reqSetVringCall        = 13
	reqSetVringErr         = 14
	reqGetProtocolFeatures = 15
	reqSetProtocolFeatures = 16
	reqGetQueueNum         = 17
	reqSetVringEnable      = 18
	reqSetBackendReqFD     = 21
	reqGetConfig           = 24
	reqSetConfig           = 25
	reqGetInflightFD       = 31
	reqSetInflightFD       = 32
	reqResetDevice         = 34
	reqGetMaxMemSlots      = 36
	reqAddMemReg           = 37
	reqRemMemReg           = 38
	reqSetStatus           = 39
	reqGetStatus           = 40
)

// backendConfigChange is a message of this side, by the back channel.
const backendConfigChange = 2

// Protocol features.
const (
	protocolMQ          = 1 << 0
	protocolLogSHMFD    = 1 << 1
	protocolReplyAck    = 1 << 3
	protocolBackendReq  = 1 << 5
	protocolConfig      = 1 << 9
	protocolInflight    = 1 << 12
	protocolResetDevice = 1 << 13
	protocolMemSlots    = 1 << 15
	protocolStatus      = 1 << 16
	protocolFeatures    = protocolMQ | protocolLogSHMFD | protocolReplyAck |
		protocolBackendReq | protocolConfig | protocolInflight | protocolResetDevice |
		protocolMemSlots | protocolStatus
)

// Flags of a message's header.
const (
	flagVersion   = 1
	flagReply     = 1 << 2
	flagNeedReply = 1 << 3
	versionMask   = 3
)

// vringNoFD says that a message about an eventfd has none.
const vringNoFD = 1 << 8

// closeFD closes a descriptor, unless it is -1.
func closeFD(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd)
	}
}

const (
	headerSize = 12
	// maxPayload is larger than any payload of a front end's message. Bytes.
	maxPayload = 4096
	// maxFDs is the most descriptors of a message: a memory table has eight.
	maxFDs = 8
	// messageTime is how long a front end may take for the rest of a message, and for taking a
	// reply.
	messageTime = 30 * time.Second
)

// message is a message of the front end. Its descriptors are closed with it, unless they were
// taken.
type message struct {
	request, flags uint32
	payload        []byte
	// fds are plain numbers: an os.File would change the mode of a file that is shared with the
	// peer
	fds []int
}

// close closes the descriptors that nobody has taken.
func (m *message) close() {
	for i := range m.fds {
		if fd := m.take(i); fd >= 0 {
			_ = unix.Close(fd)
		}
	}
	m.fds = nil
}

// take returns a descriptor, which the caller then owns; -1: there is none.
func (m *message) take(i int) int {
	if i >= len(m.fds) {
		return -1
	}
	fd := m.fds[i]
	m.fds[i] = -1
	return fd
}

func (m *message) u64() (uint64, error) {
	if len(m.payload) != 8 {
		return 0, m.wrongSize()
	}
	return binary.LittleEndian.Uint64(m.payload), nil
}

// state parses a payload of two numbers: the index of a ring, and a value for it.
func (m *message) state() (index, num uint32, err error) {
	if len(m.payload) != 8 {
		return 0, 0, m.wrongSize()
	}
	return binary.LittleEndian.Uint32(m.payload), binary.LittleEndian.Uint32(m.payload[4:]), nil
}

func (m *message) wrongSize() error {
	return fmt.Errorf("message %d has %d bytes of payload, which it cannot have", m.request,
		len(m.payload))
}

// receive reads the next message. It waits for the first byte without a limit.
func receive(c *net.UnixConn) (*message, error) {
	m := &message{}
	var header [headerSize]byte
	oob := make([]byte, unix.CmsgSpace(4*maxFDs))
	for n := 0; n < headerSize; {
		got, oobn, flags, _, err := c.ReadMsgUnix(header[n:], oob)
		if err == nil && got == 0 {
			err = io.EOF
		}
		if ferr := m.addFDs(oob[:oobn]); err == nil {
			err = ferr
		}
		if err == nil && flags&unix.MSG_CTRUNC != 0 {
			err = fmt.Errorf("a message has more than %d descriptors", maxFDs)
		}
		if err != nil {
			m.close()
			if n > 0 && err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
		if n == 0 {
			_ = c.SetReadDeadline(time.Now().Add(messageTime))
		}
		n += got
	}
	m.request = binary.LittleEndian.Uint32(header[:])
	m.flags = binary.LittleEndian.Uint32(header[4:])
	size := binary.LittleEndian.Uint32(header[8:])
	err := m.check(size)
	if err == nil {
		m.payload = make([]byte, size)
		_, err = io.ReadFull(c, m.payload)
	}
	if err != nil {
		m.close()
		return nil, err
	}
	_ = c.SetReadDeadline(time.Time{})
	return m, nil
}

func (m *message) check(size uint32) error {
	switch {
	case m.flags&versionMask != flagVersion:
		return fmt.Errorf("message %d has version %d of the protocol: it is not vhost-user",
			m.request, m.flags&versionMask)
	case m.flags&flagReply != 0:
		return fmt.Errorf("message %d is a reply to nothing", m.request)
	case size > maxPayload:
		return fmt.Errorf("message %d announces %d bytes: %d are the most", m.request, size,
			maxPayload)
	}
	return nil
}

// addFDs takes the descriptors out of control messages.
func (m *message) addFDs(oob []byte) error {
	if len(oob) == 0 {
		return nil
	}
	controls, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return err
	}
	for _, control := range controls {
		fds, err := unix.ParseUnixRights(&control)
		if err != nil {
			continue // it has no descriptors
		}
		m.fds = append(m.fds, fds...)
	}
	if len(m.fds) > maxFDs {
		return fmt.Errorf("a message has more than %d descriptors", maxFDs)
	}
	return nil
}

// send writes a message, and a descriptor with it unless it is -1.
func send(c *net.UnixConn, request, flags uint32, payload []byte, fd int) error {
	b := binary.LittleEndian.AppendUint32(nil, request)
	b = binary.LittleEndian.AppendUint32(b, flags|flagVersion)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
	b = append(b, payload...)
	var oob []byte
	if fd >= 0 {
		oob = unix.UnixRights(fd)
	}
	_ = c.SetWriteDeadline(time.Now().Add(messageTime))
	n, _, err := c.WriteMsgUnix(b, oob, nil)
	if err == nil && n < len(b) {
		_, err = c.Write(b[n:])
	}
	return err
}

// errNotEventFD refuses a descriptor for notifications that is not an eventfd: a read or write of
// anything else could wait for the peer.
var errNotEventFD = errors.New("the descriptor is not an eventfd")

// checkEventFD refuses a descriptor that is not an eventfd.
func checkEventFD(fd int) error {
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return err
	}
	if name != "anon_inode:[eventfd]" {
		return errNotEventFD
	}
	return nil
}
