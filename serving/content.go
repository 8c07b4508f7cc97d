package serving

import (
	"crypto/rand"
	"fmt"

	"kubevirt.io/disk/disk"
)

// A client that comes back after its connection broke must know whether it finds what it left. Two
// names tell it. Boot names this use of the disk: if it is still the same, everything that was
// acknowledged is there, durable or not. Generation names the content: if it is another one, the
// disk is not what the client has seen.

// storedContent is the name under which the generation of a disk's content is kept.
const storedContent = "content"

// Generation names the content of the disk, also after restarts. It changes when the disk's content
// is replaced as a whole: by another disk's, or by that of a snapshot. It is drawn when a client
// first asks for it. "": none, because the disk cannot be written. An error says that it cannot be
// read or kept now.
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
// client must not take the next content for the one that it knows, and nothing of the former
// content must be put back over it.
func EndGeneration(store Store) error {
	if err := store.Save(storedContent, nil); err != nil {
		return fmt.Errorf("clients could take the disk for what it was before: %w", err)
	}
	if err := store.Save(disk.StoredAtomic, nil); err != nil {
		return fmt.Errorf("what an atomic write has replaced would be put back: %w", err)
	}
	return nil
}

// WrittenByMany reports whether others may write the disk beside one of its clients, here or where
// the disk is.
func (d *Disk) WrittenByMany() bool {
	return !d.exclusive.Load() && !d.protected.Load() || d.Remote != nil && d.Remote.Shared()
}

// LastUsedBy reports whether an incarnation of a name is the last that has used an exclusive disk,
// also before a restart: nobody else has changed it since.
func (d *Disk) LastUsedBy(name, incarnation string) bool {
	return d.exclusive.Load() && d.ownerName() == incarnationName(name, incarnation)
}

// forgetLast says in a state that others may write the disk from now on, beside its owner: when the
// disk is exclusive again, no incarnation is the last that has used it. The caller has handing, or
// the disk is not in use yet.
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

// Resume makes the client the owner of an exclusive disk again, if it is the last that has used it.
// So nobody changes the disk between this answer and what the client does because of it.
func (c *Client) Resume(d *Disk) {
	c.disks.mu.Lock()
	defer c.disks.mu.Unlock()
	if d.exclusive.Load() && d.ownerName() == c.peer.name && !d.isFenced(c) {
		d.owner.Store(c.peer)
	}
}
