package serving

import (
	"fmt"

	"kubevirt.io/disk/disk"
)

// Refusal says why a client may not use a disk now: another peer owns it, or has reserved it.
type Refusal struct {
	text   string
	former bool // a former client of the same name has the disk, and may be about to end
}

func (r *Refusal) Error() string { return r.text }

// Begin begins a request, for a front end whose protocol has no rights of its own, such as
// reservations. write says that the request changes the disk. Begin keeps the disk and its store
// until Disk.End, unless it returns an error: a *Refusal, ErrRemoved or disk.ErrReadOnly. Begin is
// quick for a client that has used the disk before and still owns it: see Used.
func (c *Client) Begin(d *Disk, write bool) error {
	if c.used.Load() != d {
		if c.waitedForFormer() {
			return c.begin(d, write)
		}
		c.disks.EndStale(c.peer.name)
	}
	err := c.begin(d, write)
	if r, ok := err.(*Refusal); ok && r.former {
		return c.afterFormer(func() error { return c.begin(d, write) })
	}
	return err
}

func (c *Client) begin(d *Disk, write bool) error {
	if err := d.barred(write); err != nil {
		return err
	}
	if !c.ClaimFor(d, write) {
		return c.Refused(d)
	}
	if c.used.Load() != d {
		if err := c.FirstUse(d); err != nil {
			return err
		}
		c.used.Store(d)
	}
	if !d.Begin() {
		return ErrRemoved
	}
	c.disks.KeepOwner(d)
	if write && d.Protected() {
		d.End()
		return disk.ErrReadOnly
	}
	return nil
}

// Used reports whether the next Begin does not wait: the client has used the disk before, and owns
// it or the disk is shared.
func (c *Client) Used(d *Disk) bool { return c.used.Load() == d && c.Owns(d) }

// Permits returns an error if a request that has begun must not go on: a *Refusal, ErrAborted or
// ErrRemoved. Since the request began, which can be long ago, the client may have been fenced, or
// the disk reserved by another. So a front end calls Permits before each step that changes the
// disk, or reads what others change.
func (c *Client) Permits(r *Request, d *Disk, write bool) error {
	if err := r.Wanted(d); err != nil {
		return err
	}
	if !c.Admitted(d) {
		return c.Refused(d)
	}
	return d.barred(write)
}

// barred returns a *Refusal if the disk is reserved by the protocol of another front end.
func (d *Disk) barred(write bool) error {
	for _, f := range d.fronts {
		if err := f.Bars(d, write); err != nil {
			return &Refusal{text: fmt.Sprintf("LUN %d: %v", d.Number, err)}
		}
	}
	return nil
}

// Refused returns the error that says which other peer has the disk.
func (c *Client) Refused(d *Disk) error {
	name := PlainName(c.peer.name)
	switch {
	case c.Fenced(d):
		return &Refusal{text: fmt.Sprintf("LUN %d was handed over to another client", d.Number)}
	case name != c.peer.name && d.Owner() == name:
		return &Refusal{fmt.Sprintf("LUN %d is in use by another client that is called %s",
			d.Number, name), true}
	}
	return &Refusal{text: fmt.Sprintf("LUN %d is in use by %s", d.Number, d.Owner())}
}
