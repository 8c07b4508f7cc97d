package disktest

import "kubevirt.io/disk/disk/internal/smallfile"

// NewStore makes the store in which a logical unit keeps its state beside the disk. The first Save
// makes dir. With durable, state has reached storage when Save returns.
func NewStore(dir string, durable bool) *smallfile.Store { return smallfile.NewStore(dir, durable) }
