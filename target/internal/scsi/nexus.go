package scsi

import (
	"sync/atomic"

	"kubevirt.io/disk/serving"
)

// InitiatorPort names the initiator's end of an I_T nexus: for iSCSI the initiator name and its
// ISID.
type InitiatorPort struct {
	Name string
	ISID [6]byte
}

// Nexus is one I_T nexus, which for iSCSI is one session.
type Nexus struct {
	*serving.Client
	port       InitiatorPort
	slots      atomic.Pointer[nexusUnits] // never nil; written under Device.mu
	level      uint16                     // see SetProtocolLevel
	toldOfList atomic.Bool                // an asynchronous event said that the list has changed

	copies []*copyOperation // guarded by Device.mu; in order of their start
}

// nexusUnit is the state of a nexus at a logical unit: the I_T_L nexus (SAM-5 4.7).
type nexusUnit struct {
	unit *unit
	attentions
	unprobed  atomic.Bool // it knows only a former disk of this number; written under Device.mu
	cameLater bool        // the unit came later than the nexus
	// flags that a command needs to pass the reservations; written under Device.mu
	barred  atomic.Uint32
	refused atomic.Bool // the log already says that the initiator is fenced
	used    atomic.Bool // the nexus has used the medium; written under Device.mu
}

// levelRFC7144 is the protocol level with the task management functions of RFC 7144.
const levelRFC7144 = 2

// SetProtocolLevel sets the iSCSIProtocolLevel that the session has negotiated, from 0 to 31 (RFC
// 7144 7.1.1). INQUIRY and REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS report it. Call it before the
// first command.
func (n *Nexus) SetProtocolLevel(level int) { n.level = uint16(level) }

// maxKnownPorts bounds how many former initiator ports are remembered.
const maxKnownPorts = 4096

// Attach makes the nexus of a new session. Its first command to each logical unit gets a unit
// attention: I_T NEXUS LOSS OCCURRED (29/07) if this port had a session before, else POWER ON,
// RESET, OR BUS DEVICE RESET OCCURRED (29/00). So the initiator knows that it may have missed
// something.
func (d *Device) Attach(p InitiatorPort) *Nexus {
	client := d.disks.Attach(p.Name)
	d.mu.Lock()
	defer d.mu.Unlock()
	cause := attnPowerOn
	seen, known := d.known[p]
	if known {
		cause = attnNexusLoss
	} else if len(d.known) < maxKnownPorts {
		d.known[p] = d.changes
	}
	n := &Nexus{port: p, Client: client}
	slots := make(nexusUnits, d.slots)
	n.slots.Store(&slots)
	for _, u := range d.luns.Load().units {
		at := n.meetLocked(d, u)
		at.raise(cause)
		if u.Grown && !known || known && u.grownAt > seen {
			at.raise(attnCapacityChanged)
		}
		if known && d.changes > seen {
			at.raise(attnLUNsChanged)
		}
	}
	d.nexuses[n] = struct{}{}
	return n
}

// Detach ends a nexus. Its RESERVE(6) reservations end. When the last nexus of an initiator name
// ends, so do its exclusive claims. Persistent reservations stay. Commands whose disk calls still
// run may end later. A second call does nothing.
func (d *Device) Detach(n *Nexus) {
	defer n.Client.Detach()
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.nexuses[n]; !ok {
		return
	}
	delete(d.nexuses, n)
	spoke, missed := false, false
	for _, u := range d.luns.Load().units {
		if pending := n.at(u).pending.Load(); pending&uint32(attnPowerOn|attnNexusLoss) == 0 {
			spoke = true
			missed = missed || pending&uint32(attnCapacityChanged|attnLUNsChanged) != 0
		}
		if u.reserved.Load() == n {
			d.reserveLocked(u, nil)
		}
	}
	// A connection may have been broken for a long time before its session ends.
	if _, known := d.known[n.port]; known && spoke && !missed {
		d.known[n.port] = d.changes
	}
}
