package disktest

import "kubevirt.io/disk/disk/internal/smallfile"

// NewStore is the store of a disk, in a directory that is made when something is saved: what a
// logical unit keeps there with an instance. With durable what is saved has reached storage.
func NewStore(dir string, durable bool) *smallfile.Store { return smallfile.NewStore(dir, durable) }
