package vhosttest

import (
	"encoding/binary"
	"fmt"
)

// Request is the number of a message from the front end ("Front-end message types" of QEMU's
// docs/interop/vhost-user).
type Request uint32

// The requests that concern a block device.
const (
	GetFeatures         Request = 1
	SetFeatures         Request = 2
	SetOwner            Request = 3
	ResetOwner          Request = 4
	SetMemTable         Request = 5
	SetLogBase          Request = 6
	SetLogFD            Request = 7
	SetVringNum         Request = 8
	SetVringAddr        Request = 9
	SetVringBase        Request = 10
	GetVringBase        Request = 11
	SetVringKick        Request = 12
	SetVringCall        Request = 13
	SetVringErr         Request = 14
	GetProtocolFeatures Request = 15
	SetProtocolFeatures Request = 16
	GetQueueNum         Request = 17
	SetVringEnable      Request = 18
	SetBackendReqFD     Request = 21
	GetConfig           Request = 24
	SetConfig           Request = 25
	GetInflightFD       Request = 31
	SetInflightFD       Request = 32
	ResetDevice         Request = 34
	VringKick           Request = 35
	GetMaxMemSlots      Request = 36
	AddMemReg           Request = 37
	RemMemReg           Request = 38
	SetStatus           Request = 39
	GetStatus           Request = 40
)

var requestNames = map[Request]string{
	GetFeatures: "GET_FEATURES", SetFeatures: "SET_FEATURES", SetOwner: "SET_OWNER",
	ResetOwner: "RESET_OWNER", SetMemTable: "SET_MEM_TABLE", SetLogBase: "SET_LOG_BASE",
	SetLogFD: "SET_LOG_FD", SetVringNum: "SET_VRING_NUM", SetVringAddr: "SET_VRING_ADDR",
	SetVringBase: "SET_VRING_BASE", GetVringBase: "GET_VRING_BASE",
	SetVringKick: "SET_VRING_KICK", SetVringCall: "SET_VRING_CALL", SetVringErr: "SET_VRING_ERR",
	GetProtocolFeatures: "GET_PROTOCOL_FEATURES", SetProtocolFeatures: "SET_PROTOCOL_FEATURES",
	GetQueueNum: "GET_QUEUE_NUM", SetVringEnable: "SET_VRING_ENABLE",
	SetBackendReqFD: "SET_BACKEND_REQ_FD", GetConfig: "GET_CONFIG", SetConfig: "SET_CONFIG",
	GetInflightFD: "GET_INFLIGHT_FD", SetInflightFD: "SET_INFLIGHT_FD",
	ResetDevice: "RESET_DEVICE", VringKick: "VRING_KICK", GetMaxMemSlots: "GET_MAX_MEM_SLOTS",
	AddMemReg: "ADD_MEM_REG", RemMemReg: "REM_MEM_REG", SetStatus: "SET_STATUS",
	GetStatus: "GET_STATUS",
}

func (r Request) String() string {
	if name, ok := requestNames[r]; ok {
		return name
	}
	return fmt.Sprintf("request %d", uint32(r))
}

// Flags of a message.
const (
	FlagVersion   uint32 = 1 // version 1 of the protocol
	FlagReply     uint32 = 1 << 2
	FlagNeedReply uint32 = 1 << 3
)

// Features of virtio and of its block device (virtio 1.2, sections 5.2.3 and 6).
const (
	FeatureReadOnly         uint64 = 1 << 5  // VIRTIO_BLK_F_RO
	FeatureBlockSize        uint64 = 1 << 6  // VIRTIO_BLK_F_BLK_SIZE
	FeatureFlush            uint64 = 1 << 9  // VIRTIO_BLK_F_FLUSH
	FeatureTopology         uint64 = 1 << 10 // VIRTIO_BLK_F_TOPOLOGY
	FeatureWriteCache       uint64 = 1 << 11 // VIRTIO_BLK_F_CONFIG_WCE
	FeatureQueues           uint64 = 1 << 12 // VIRTIO_BLK_F_MQ
	FeatureDiscard          uint64 = 1 << 13 // VIRTIO_BLK_F_DISCARD
	FeatureWriteZeroes      uint64 = 1 << 14 // VIRTIO_BLK_F_WRITE_ZEROES
	FeatureLogAll           uint64 = 1 << 26 // VHOST_F_LOG_ALL: while a guest migrates
	FeatureIndirect         uint64 = 1 << 28 // VIRTIO_F_INDIRECT_DESC
	FeatureEventIndex       uint64 = 1 << 29 // VIRTIO_F_EVENT_IDX
	FeatureProtocolFeatures uint64 = 1 << 30 // VHOST_USER_F_PROTOCOL_FEATURES
	FeatureVersion1         uint64 = 1 << 32 // VIRTIO_F_VERSION_1

	// VIRTIO_BLK_F_SIZE_MAX and VIRTIO_BLK_F_SEG_MAX
	featureSizeMax uint64 = 1 << 1
	featureSegMax  uint64 = 1 << 2
)

// known are the features that the driver asks for if they are offered and not masked.
// FeatureLogAll is set when a log begins.
const known = featureSizeMax | featureSegMax | FeatureReadOnly | FeatureBlockSize | FeatureFlush |
	FeatureTopology | FeatureWriteCache | FeatureQueues | FeatureDiscard | FeatureWriteZeroes |
	FeatureIndirect | FeatureEventIndex | FeatureProtocolFeatures | FeatureVersion1

// Protocol features.
const (
	ProtocolMQ         uint64 = 1 << 0
	ProtocolLog        uint64 = 1 << 1  // LOG_SHMFD
	ProtocolReplyAck   uint64 = 1 << 3  // REPLY_ACK
	ProtocolBackendReq uint64 = 1 << 5  // BACKEND_REQ: the back channel
	ProtocolConfig     uint64 = 1 << 9  // CONFIG
	ProtocolInflight   uint64 = 1 << 12 // INFLIGHT_SHMFD
	ProtocolReset      uint64 = 1 << 13 // RESET_DEVICE
	ProtocolInBand     uint64 = 1 << 14 // INBAND_NOTIFICATIONS; the driver never asks for it
	ProtocolMemSlots   uint64 = 1 << 15 // CONFIGURE_MEM_SLOTS
	ProtocolStatus     uint64 = 1 << 16 // STATUS
)

const knownProtocol = ProtocolMQ | ProtocolLog | ProtocolReplyAck | ProtocolBackendReq |
	ProtocolConfig | ProtocolInflight | ProtocolReset | ProtocolMemSlots | ProtocolStatus

// None masks all features, where the zero value of an option means all.
const None uint64 = 1 << 63

// Message is one message. Fields are sent as they are, so it may lie. Its size is that of Payload.
type Message struct {
	Request Request
	Flags   uint32 // with FlagVersion
	Payload []byte
	FDs     []int
}

const headerLen = 12

// Header is the header of a message. A test that sends it by Conn.SendBytes may lie about the size.
func Header(r Request, flags, size uint32) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(r))
	b = binary.NativeEndian.AppendUint32(b, flags)
	return binary.NativeEndian.AppendUint32(b, size)
}

// U64 is a payload of 64-bit numbers: one, or those of a region or of a log.
func U64(values ...uint64) (b []byte) {
	for _, v := range values {
		b = binary.NativeEndian.AppendUint64(b, v)
	}
	return b
}

// U32 is a payload of 32-bit numbers, such as the state of a ring: its index and a number.
func U32(values ...uint32) (b []byte) {
	for _, v := range values {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	return b
}

// u64 is the number that a reply carries.
func (m Message) u64() (uint64, error) {
	if len(m.Payload) != 8 {
		return 0, fmt.Errorf("%w: the reply to %v has %d bytes, not 8", ErrViolation, m.Request,
			len(m.Payload))
	}
	return binary.NativeEndian.Uint64(m.Payload), nil
}
