package metrics

import (
	"time"

	"kubevirt.io/disk/serving"
)

// Work is the work of initiators at a LUN since the start.
type Work struct{ Read, Write Done }

// Done are commands that ended, whatever their status.
type Done struct {
	Commands, Bytes uint64
	Time            time.Duration // of all commands together, from arrival to response
}

// Work returns the work at each LUN that got commands.
func (m *Metrics) Work() map[uint16]Work {
	all := map[uint16]Work{}
	add := func(i *initiator) {
		for lun, s := range i.units.all() {
			if lun == otherLUN {
				continue
			}
			w := all[uint16(lun)]
			w.Read.add(&s.ops[operationIndex(serving.OpRead)])
			w.Write.add(&s.ops[operationIndex(serving.OpWrite)])
			all[uint16(lun)] = w
		}
	}
	add(&m.initiators.rest)
	for _, i := range m.initiators.names.all() {
		if i != &m.initiators.rest {
			add(i)
		}
	}
	return all
}

func (d *Done) add(c *counters) {
	d.Bytes += c.bytes.Load()
	d.Time += time.Duration(c.nanos.Load())
	for b := range c.took {
		d.Commands += c.took[b].Load()
	}
}
