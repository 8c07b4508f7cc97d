package login

// The keys of the standard that the target knows (RFC 7143 sections 12 and 13, RFC 7144 7.1.1).
const (
	keySessionType    = "SessionType"
	keyInitiatorName  = "InitiatorName"
	keyInitiatorAlias = "InitiatorAlias"
	keyTargetName     = "TargetName"

	keyTargetAlias          = "TargetAlias"
	keyTargetAddress        = "TargetAddress"
	keyTargetPortalGroupTag = "TargetPortalGroupTag"

	keyAuthMethod = "AuthMethod"
	keyChapA      = "CHAP_A"
	keyChapI      = "CHAP_I"
	keyChapC      = "CHAP_C"
	keyChapN      = "CHAP_N"
	keyChapR      = "CHAP_R"

	keyHeaderDigest             = "HeaderDigest"
	keyDataDigest               = "DataDigest"
	keyMaxConnections           = "MaxConnections"
	keyInitialR2T               = "InitialR2T"
	keyImmediateData            = "ImmediateData"
	keyMaxRecvDataSegmentLength = "MaxRecvDataSegmentLength"
	keyMaxBurstLength           = "MaxBurstLength"
	keyFirstBurstLength         = "FirstBurstLength"
	keyDefaultTime2Wait         = "DefaultTime2Wait"
	keyDefaultTime2Retain       = "DefaultTime2Retain"
	keyMaxOutstandingR2T        = "MaxOutstandingR2T"
	keyDataPDUInOrder           = "DataPDUInOrder"
	keyDataSequenceInOrder      = "DataSequenceInOrder"
	keyErrorRecoveryLevel       = "ErrorRecoveryLevel"
	keyTaskReporting            = "TaskReporting"
	keyISCSIProtocolLevel       = "iSCSIProtocolLevel"

	keyIFMarker  = "IFMarker"
	keyOFMarker  = "OFMarker"
	keyIFMarkInt = "IFMarkInt"
	keyOFMarkInt = "OFMarkInt"

	KeySendTargets      = "SendTargets"
	keyNodeArchitecture = "X#NodeArchitecture"
)

// role says when an initiator may send a key.
type role uint8

const (
	roleUnknown     role = iota // answered with NotUnderstood at any time
	roleName                    // declared in the first request, in either stage
	roleAlias                   // declared at any time
	roleSecurity                // in SecurityNegotiation
	roleOperational             // in OperationalNegotiation
	roleTargetOnly              // never; only a target sends it
	roleFullFeature             // in full feature phase
	roleIgnored                 // at any time, without effect (RFC 7143 13.26.2)
)

// roles holds every key that must not be answered with NotUnderstood (RFC 7143 6.2).
var roles = map[string]role{
	keySessionType:    roleName,
	keyInitiatorName:  roleName,
	keyTargetName:     roleName,
	keyInitiatorAlias: roleAlias,

	keyTargetAlias:          roleTargetOnly,
	keyTargetAddress:        roleTargetOnly,
	keyTargetPortalGroupTag: roleTargetOnly,

	keyAuthMethod: roleSecurity,
	keyChapA:      roleSecurity,
	keyChapI:      roleSecurity,
	keyChapC:      roleSecurity,
	keyChapN:      roleSecurity,
	keyChapR:      roleSecurity,

	keyHeaderDigest:             roleOperational,
	keyDataDigest:               roleOperational,
	keyMaxConnections:           roleOperational,
	keyInitialR2T:               roleOperational,
	keyImmediateData:            roleOperational,
	keyMaxRecvDataSegmentLength: roleOperational,
	keyMaxBurstLength:           roleOperational,
	keyFirstBurstLength:         roleOperational,
	keyDefaultTime2Wait:         roleOperational,
	keyDefaultTime2Retain:       roleOperational,
	keyMaxOutstandingR2T:        roleOperational,
	keyDataPDUInOrder:           roleOperational,
	keyDataSequenceInOrder:      roleOperational,
	keyErrorRecoveryLevel:       roleOperational,
	keyTaskReporting:            roleOperational,
	keyISCSIProtocolLevel:       roleOperational,
	keyIFMarker:                 roleOperational,
	keyOFMarker:                 roleOperational,
	keyIFMarkInt:                roleOperational,
	keyOFMarkInt:                roleOperational,

	KeySendTargets:      roleFullFeature,
	keyNodeArchitecture: roleIgnored,
}
