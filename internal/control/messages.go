package control

import "kubevirt.io/disk/target"

// The endpoints of the socket.
const (
	pathHandover = "/handover"
	pathSessions = "/sessions"
	pathKick     = "/kick"
)

// Action is a step of a handover.
type Action string

const (
	ActionOpen   Action = "open"   // a second initiator may use the LUN too
	ActionFinish Action = "finish" // the second gets the LUN, the first is fenced
	ActionCancel Action = "cancel" // the first keeps the LUN, the second is fenced
)

// Handover asks for one step of a handover.
type Handover struct {
	Action  Action  `json:"action"`
	LUN     uint16  `json:"lun"`
	To      string  `json:"to,omitempty"`      // initiator name, for ActionOpen
	Seconds float64 `json:"seconds,omitempty"` // of ActionOpen; 0: until another step
}

// Kick asks to end sessions, by initiator or by number.
type Kick struct {
	Initiator string `json:"initiator,omitempty"` // every session of this name
	Session   uint16 `json:"session,omitempty"`   // its TSIH
}

// handoverAnswer tells a person what was done.
type handoverAnswer struct {
	Done string `json:"done"`
}

// sessionsAnswer lists the sessions, oldest first.
type sessionsAnswer struct {
	Sessions []target.SessionInfo `json:"sessions"`
}

// kickAnswer lists the sessions that were ended.
type kickAnswer struct {
	Ended []target.SessionInfo `json:"ended"`
}

// refusal is the answer to a refused request.
type refusal struct {
	Error string `json:"error"`
}
