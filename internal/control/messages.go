package control

import "kubevirt.io/disk/target"

// What the socket can be asked.
const (
	pathHandover = "/handover"
	pathSessions = "/sessions"
	pathKick     = "/kick"
)

// Action is what is to be done about a handover.
type Action string

const (
	ActionOpen   Action = "open"   // a second initiator may use the LUN, too
	ActionFinish Action = "finish" // the second one has it, and the first is fenced
	ActionCancel Action = "cancel" // the first one keeps it, and the second is fenced
)

// Handover asks for one step of a handover.
type Handover struct {
	Action  Action  `json:"action"`
	LUN     uint16  `json:"lun"`
	To      string  `json:"to,omitempty"`      // initiator name, of ActionOpen
	Seconds float64 `json:"seconds,omitempty"` // that it stays open; 0: until another step
}

// Kick asks for the end of sessions: of one of the two.
type Kick struct {
	Initiator string `json:"initiator,omitempty"` // every session of this name
	Session   uint16 `json:"session,omitempty"`   // its target session identifying handle
}

// handoverAnswer is how a handover went, for a person.
type handoverAnswer struct {
	Done string `json:"done"`
}

// sessionsAnswer is who is logged in, oldest first.
type sessionsAnswer struct {
	Sessions []target.SessionInfo `json:"sessions"`
}

// kickAnswer is which sessions have ended.
type kickAnswer struct {
	Ended []target.SessionInfo `json:"ended"`
}

// refusal is the answer to what is not done.
type refusal struct {
	Error string `json:"error"`
}
