// Package login is the target's side of the login phase of an iSCSI connection, and of the
// negotiation of text keys (RFC 7143 sections 6, 12 and 13). It knows neither connections nor PDUs:
// text goes in and text comes out.
//
// The data segments of login and text PDUs are key=value pairs. Each ends with a zero byte. They
// may be cut anywhere:
//
//	InitiatorName=iqn.2001-04.com.example:host NUL SessionType=Normal NUL AuthMethod=CHAP,None NUL
//
// A login goes through stages. The initiator moves on with the T bit, and never goes back:
//
//	SecurityNegotiation (0)     names, AuthMethod, CHAP          -> 1 or 3
//	OperationalNegotiation (1)  digests, lengths, data transfer  -> 3
//	FullFeature (3)             the session exists
package login

import (
	"fmt"

	"kubevirt.io/disk/chap"
)

// Stage is a stage of the login phase, as in the CSG and NSG fields (RFC 7143 11.12.3).
type Stage uint8

// The stages; 2 is reserved.
const (
	SecurityNegotiation    Stage = 0
	OperationalNegotiation Stage = 1
	FullFeature            Stage = 3
)

// String names the stage.
func (s Stage) String() string {
	switch s {
	case SecurityNegotiation:
		return "SecurityNegotiation"
	case OperationalNegotiation:
		return "LoginOperationalNegotiation"
	case FullFeature:
		return "FullFeaturePhase"
	}
	return fmt.Sprintf("Stage(%d)", uint8(s))
}

// SessionType is the purpose of a session (RFC 7143 13.21).
type SessionType uint8

// The session types.
const (
	Normal SessionType = iota
	Discovery
)

// String returns the value of the SessionType key.
func (t SessionType) String() string {
	switch t {
	case Normal:
		return "Normal"
	case Discovery:
		return "Discovery"
	}
	return fmt.Sprintf("SessionType(%d)", uint8(t))
}

// The most that the target agrees to, in bytes.
const (
	// MaxDataSegment is the longest data segment that the target receives, and the most unsolicited
	// data of a command.
	MaxDataSegment = 256 << 10
	maxBurst       = 1 << 20 // of a solicited sequence
	// maxKeyBytes is how much text one login may send in total. The standard demands 8192 (RFC 7143
	// 6.1).
	maxKeyBytes = 16 << 10
)

// Config is common to all logins of a target. It must not change while it is in use.
type Config struct {
	TargetName     string // the only target that a normal session can log in to
	PortalGroupTag uint16
	Auth           *chap.Authenticator // nil: initiators need not authenticate
}

// Request is a Login Request (RFC 7143 11.12).
type Request struct {
	CSG, NSG               Stage
	Transit, Continue      bool
	VersionMin, VersionMax uint8
	ISID                   [6]byte
	TSIH, CID              uint16
	Data                   []byte // not kept
}

// Response is the Login Response to a request (RFC 7143 11.13).
type Response struct {
	CSG, NSG          Stage
	Transit, Continue bool
	// With any status but StatusSuccess, the connection closes after this response.
	Status Status
	Data   []byte
	Err    error  // why the login was refused, for the log; nil if it was not
	Reason string // why the login was refused, as a short stable label; "" if it was not
}

// Result is what the login has found out so far. It is complete when the machine is done.
type Result struct {
	InitiatorName  string // lower case
	InitiatorAlias string
	TargetName     string // the name that the initiator asked for; may be "" in a discovery session
	SessionType    SessionType
	User           string // the authenticated user; "" without authentication
	Tried          string // the name that the initiator gave to authenticate; "" if none yet
	Params         Params
}
