package serving

// Front is a front end: it serves all disks by a protocol. A method must not call anything that
// takes Disks.mu, except Added.
type Front interface {
	// Added is called before a disk is in use. It may wait for the disk's store. If it returns an
	// error, the disk is not added.
	Added(*Disk) error
	// Removed is called when a disk is no longer in use. Begin refuses it already. Removed is also
	// called for a disk that Added has accepted, but that another front end has refused.
	Removed(*Disk)
	// Resized is called when a disk has grown.
	Resized(*Disk)
	// Protected is called with Disks.mu held when the write protection of a disk has changed.
	Protected(*Disk)
	// Shared is called with Disks.mu held when a disk is no longer for one peer at a time.
	Shared(*Disk)
	// Bars returns why clients of other front ends may not use a disk now, or nil: the disk is
	// reserved by this protocol. It is called at each of their requests, so it takes no lock. write
	// says that the request changes the disk.
	Bars(d *Disk, write bool) error
	// Holders returns the names of peers that hold a right to a disk even without a session. It is
	// called with Disks.mu held.
	Holders(*Disk) []string
	// Fence begins to take away the rights, such as reservations, of peers for whose name fenced
	// returns true. They could not give the rights up themselves any more, and these would bar the
	// peers that may use the disk.
	Fence(d *Disk, fenced func(name string) bool) (Fencing, error)
}

// Fencing is prepared by a front end so that peers can be fenced. Either Commit and Finish are
// called, or Undo.
type Fencing interface {
	// Commit is called with Disks.mu held, at the same time as the fence takes effect.
	Commit()
	// Finish ends the requests of the fenced peers at the disk. Their new requests are refused
	// already. The caller waits for requests that can still change the disk.
	Finish()
	// Undo restores the rights that Fence has taken: nobody is fenced.
	Undo() error
}

// NoRights is the part of a Front whose protocol has no reservations, and whose peers have no
// rights without a connection.
type NoRights struct{}

// Bars implements Front.
func (NoRights) Bars(*Disk, bool) error { return nil }

// Holders implements Front.
func (NoRights) Holders(*Disk) []string { return nil }

// FenceBy is the Fencing of such a front end: it only has a Finish.
type FenceBy func()

func (FenceBy) Commit() {}

func (finish FenceBy) Finish() { finish() }

func (FenceBy) Undo() error { return nil }
