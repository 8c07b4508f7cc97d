package status

import (
	"slices"
	"strconv"
	"time"
)

// DiskState is the state of a disk.
type DiskState string

// The states of a disk, the worst ones first.
const (
	DiskFailed   DiskState = "failed"   // until it is opened again
	DiskWaiting  DiskState = "waiting"  // requests wait for a registry, a server or storage
	DiskNoSpace  DiskState = "no_space" // requests that need new space fail
	DiskFailing  DiskState = "failing"  // requests fail for another reason
	DiskStarting DiskState = "starting" // it cannot be used yet
	DiskFenced   DiskState = "fenced"   // only peers that a handover has fenced want it
	DiskMoved    DiskState = "moved"    // another daemon serves it for its machine now
	DiskReady    DiskState = "ready"
)

// DiskStates are all states, the worst ones first.
var DiskStates = []DiskState{DiskFailed, DiskWaiting, DiskNoSpace, DiskFailing, DiskStarting,
	DiskFenced, DiskMoved, DiskReady}

// Rank is how bad a state is: 0 is the worst one, and an unknown one comes last.
func (s DiskState) Rank() int {
	if i := slices.Index(DiskStates, s); i >= 0 {
		return i
	}
	return len(DiskStates)
}

// Troubled reports whether a person should look at a disk in this state.
func (s DiskState) Troubled() bool {
	return s != DiskReady && s != DiskStarting && s != DiskMoved
}

// Usable reports whether guests should log in to this daemon for a disk in this state. A disk that
// waits, has no space or is fenced recovers while guests stay, or by a new login.
func (s DiskState) Usable() bool {
	return s != DiskFailed && s != DiskMoved && s != DiskStarting
}

// The kinds of trouble.
const (
	TroubleRegistry     = "registry"  // requests wait for an image in a registry
	TroubleServer       = "server"    // requests wait for the server that has the disk
	TroubleStorage      = "storage"   // requests wait for storage of this machine
	TroubleNoSpace      = "no_space"  // the storage is full
	TroubleReadOnly     = "read_only" // the storage can no longer be written
	TroubleReadError    = "read_error"
	TroubleWriteError   = "write_error"
	TroubleReservations = "reservations" // they cannot be kept
	TroubleNotNow       = "not_now"      // remote content cannot be reached
	TroubleFenced       = "fenced"       // a fenced peer is refused, and there is no other
	TroubleFailed       = "failed"       // the disk has failed
	TroubleOther        = "other"
)

// Trouble is the reason why requests to a LUN wait or fail although its disk has not failed.
type Trouble struct {
	Kind    string    `json:"kind"`    // one of Trouble...
	Message string    `json:"message"` // what is wrong
	Error   string    `json:"error"`   // the last error
	Since   time.Time `json:"since"`
	Last    time.Time `json:"last"`
	Count   int64     `json:"count"` // requests that have failed, or that wait now
	// Peers are clients whose requests wait, at most eight.
	Peers []string `json:"peers,omitempty"`
}

// State is the state of a disk with this trouble.
func (t *Trouble) State() DiskState {
	switch t.Kind {
	case TroubleRegistry, TroubleServer, TroubleStorage, TroubleNotNow:
		return DiskWaiting
	case TroubleNoSpace:
		return DiskNoSpace
	case TroubleFenced:
		return DiskFenced
	case TroubleFailed:
		return DiskFailed
	}
	return DiskFailing
}

// Condition is the state of a disk, or of a start, with the reason.
type Condition struct {
	State DiskState `json:"state"`
	// Kind is one of Trouble...; "": nothing is wrong.
	Kind string `json:"kind,omitempty"`
	// Reason is the problem, or what it waits for, in words.
	Reason string    `json:"reason,omitempty"`
	Since  time.Time `json:"since,omitzero"`
	// WhatToDo is advice for a person.
	WhatToDo string `json:"what_to_do,omitempty"`
	// Requests is how many wait now, or have failed so far.
	Requests int64    `json:"requests,omitempty"`
	Peers    []string `json:"peers,omitempty"` // whose requests these are, at most eight
}

// ToDo is advice for a person about a kind of trouble.
func ToDo(kind string) string {
	switch kind {
	case TroubleRegistry, TroubleNotNow:
		return "nothing is lost, and requests go on when the content comes: see whether the " +
			"registry runs, and whether this machine reaches it"
	case TroubleServer:
		return "nothing is lost, and requests go on when the server answers: see whether it " +
			"runs, what it says of the disk, and whether this machine reaches it"
	case TroubleStorage:
		return "see whether the storage answers, such as a file server: requests go on when it does"
	case TroubleNoSpace:
		return "free space on the storage, or make it larger: writes work again at once"
	case TroubleReadOnly:
		return "repair the storage, so that it can be written again"
	case TroubleReadError, TroubleWriteError:
		return "look for errors of the drive in the kernel's log, and save what can be read"
	case TroubleReservations:
		return "see whether the directory of the disk can be written"
	case TroubleFenced:
		return "start the machine that has the disk now, or give the disk back with " +
			"kubevirt-disk handover --to"
	case TroubleFailed:
		return "repair what the reason names, and start the daemon again"
	case TroubleOther:
		return "the log has the error"
	}
	return ""
}

// Summary describes in one line how many disks are in trouble, and the worst one; "": none.
func (s *Status) Summary() string {
	n, worst := 0, -1
	for i := range s.LUNs {
		if !s.LUNs[i].State.Troubled() {
			continue
		}
		if n++; worst < 0 || s.LUNs[i].State.Rank() < s.LUNs[worst].State.Rank() {
			worst = i
		}
	}
	if n == 0 {
		return ""
	}
	l, what := &s.LUNs[worst], "disks"
	if len(s.LUNs) == 1 {
		what = "disk"
	}
	return strconv.Itoa(n) + " of " + strconv.Itoa(len(s.LUNs)) + " " + what + ": " +
		l.State.Words() + " (LUN " + strconv.Itoa(int(l.LUN)) + ")"
}

// Words is the state in words.
func (s DiskState) Words() string {
	if s == DiskNoSpace {
		return "no space"
	}
	return string(s)
}
