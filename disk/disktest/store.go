package disktest

import "kubevirt.io/disk/internal/durable"

// NewStore makes the store in which a logical unit keeps its state beside the disk. The first Save
// makes dir. With synced, state has reached storage when Save returns.
func NewStore(dir string, synced bool) *durable.Store { return durable.NewStore(dir, synced) }
