package serving

// Front is a front end: it serves all disks by a protocol. A method must not call what takes
// Disks.mu, apart from Added.
type Front interface {
	// Added is called before a disk is in use. It may wait for the disk's store. If it returns an
	// error, the disk is not added.
	Added(*Disk) error
	// Removed is called when a disk is no longer in use. Begin refuses it already. It is also
	// called for a disk that this front end has taken in, and another one has refused.
	Removed(*Disk)
	// Resized is called when a disk has grown.
	Resized(*Disk)
	// Protected is called with Disks.mu held when the write protection of a disk has changed.
	Protected(*Disk)
	// Shared is called with Disks.mu held when a disk is no longer for one peer at a time.
	Shared(*Disk)
	// Bars returns why clients of other front ends may not use a disk now, or nil: somebody has
	// reserved it by this protocol. It is called at each of their requests, so it takes no lock.
	// Write says that the request changes the disk.
	Bars(d *Disk, write bool) error
	// Holders returns the names of peers that hold a right to a disk even without a session. It is
	// called with Disks.mu held.
	Holders(*Disk) []string
	// Fence begins to take away what peers hold at a disk, such as reservations: those for whose
	// name fenced is true. They could not give it up themselves any more, and it would bar those
	// who may use the disk.
	Fence(d *Disk, fenced func(name string) bool) (Fencing, error)
}

// Fencing is what a front end has prepared so that peers can be fenced. Either Commit and Finish
// are called, or Undo.
type Fencing interface {
	// Commit is called with Disks.mu held, at the same time as the fence takes effect.
	Commit()
	// Finish ends the requests of the fenced peers at the disk. Their new ones are refused already.
	// The caller waits for those that can still change the disk.
	Finish()
	// Undo gives back what Fence has taken: nobody is fenced.
	Undo() error
}

// NoRights is the part of a Front whose protocol has no reservations, and whose peers hold nothing
// without a connection.
type NoRights struct{}

// Bars implements Front.
func (NoRights) Bars(*Disk, bool) error { return nil }

// Holders implements Front.
func (NoRights) Holders(*Disk) []string { return nil }

// FenceBy is the Fencing of such a front end: finish is all that it does.
type FenceBy func()

func (FenceBy) Commit() {}

func (finish FenceBy) Finish() { finish() }

func (FenceBy) Undo() error { return nil }
