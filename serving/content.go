package serving

import (
	"crypto/rand"
	"fmt"

	"kubevirt.io/disk/disk"
)

// A client that comes back after its connection broke must know whether the disk still has what it
// wrote. Two names tell. Boot names this use of the disk: if it is the same, everything
// acknowledged is there, durable or not. Generation names the content: if it is another, the
// content was replaced.

// storedContent is the name of the record with the generation of a disk's content.
const storedContent = "content"

// Generation names the content of the disk, also after restarts. It changes when the content is
// replaced as a whole: by another disk's, or by a snapshot's. It is drawn when a client first asks.
// "": the disk cannot be written, and has none. After an error, it cannot be read or stored now.
func (d *Disk) Generation() (string, error) {
	if d.Remote != nil {
		return d.Remote.Generation(), nil
	}
	d.generating.Lock()
	defer d.generating.Unlock()
	if d.generation != "" {
		return d.generation, nil
	}
	generation := ""
	if d.Store != nil {
		b, err := d.Store.Load(storedContent)
		if err != nil {
			return "", fmt.Errorf("which content the disk has: %w", err)
		}
		generation = string(b)
	}
	if generation == "" && !d.ReadOnly {
		generation = rand.Text()
		if d.Store != nil {
			if err := d.Store.Save(storedContent, []byte(generation)); err != nil {
				return "", fmt.Errorf("which content the disk has cannot be saved: %w", err)
			}
		}
	}
	d.generation = generation
	return generation, nil
}

// EndGeneration says that the content of a disk, which is not in use, is about to be replaced. A
// client must not take the next content for the former one, and no record of the former content may
// be put back into the next.
func EndGeneration(store Store) error {
	if err := store.Save(storedContent, nil); err != nil {
		return fmt.Errorf("clients could take the disk for what it was before: %w", err)
	}
	if err := store.Save(disk.StoredAtomic, nil); err != nil {
		return fmt.Errorf("what an atomic write has replaced would be put back: %w", err)
	}
	return nil
}

// WrittenByMany reports whether several clients may write the disk at the same time, here or at its
// server.
func (d *Disk) WrittenByMany() bool {
	return !d.exclusive.Load() && !d.protected.Load() || d.Remote != nil && d.Remote.Shared()
}

// LastUsedBy reports whether an incarnation of a name was the last user of an exclusive disk, also
// before a restart. Then nobody else has changed the disk since.
func (d *Disk) LastUsedBy(name, incarnation string) bool {
	return d.exclusive.Load() && d.ownerName() == incarnationName(name, incarnation)
}

// forgetLast changes a state so that no incarnation counts as the disk's last user, because others
// may write the disk from now on. The caller has handing, or the disk is not in use yet.
func (d *Disk) forgetLast(s *handoverState) error {
	next := *s
	next.Owner = PlainName(s.Owner)
	if next.Owner == s.Owner || d.Store == nil {
		return nil
	}
	data, err := next.encode()
	if err == nil {
		err = d.Store.Save(storedHandover, data)
	}
	if err != nil {
		return fmt.Errorf("that others may write the disk from now on cannot be saved: %w", err)
	}
	*s = next
	return nil
}

// Resume makes the client the owner of an exclusive disk again, if it was the last user. So nobody
// changes the disk between this answer and what the client does because of it.
func (c *Client) Resume(d *Disk) {
	c.disks.mu.Lock()
	defer c.disks.mu.Unlock()
	if d.exclusive.Load() && d.ownerName() == c.peer.name && !d.isFenced(c) {
		d.owner.Store(c.peer)
	}
}
