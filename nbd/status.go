package nbd

import (
	"context"
	"math"
	"runtime"

	"kubevirt.io/disk/disk"
)

// extent is a block descriptor of a BLOCK_STATUS.
type extent struct {
	length uint64 // bytes
	flags  uint32 // or the depth
}

// maxExtents is how many descriptors one reply has for a context. A client asks for the rest.
const maxExtents = 1024

// status executes and answers a BLOCK_STATUS, for the negotiated contexts or those of its payload.
func (run *run) status(payload []byte) error {
	c, q := run.c, &run.req
	off, length, wanted := q.off, q.length, c.contexts
	if payload != nil {
		n, ids, err := decodeStatusPayload(payload)
		if err != nil {
			return fail(eInval, "%v", err)
		}
		length, wanted = n, 0
		for _, id := range ids {
			if id >= 32 || !c.contexts.has(id) || wanted.has(id) {
				return fail(eInval, "context %d was not chosen, or is asked for twice", id)
			}
			wanted = wanted.with(id)
		}
		if err := run.checkRange(off, length); err != nil {
			return err
		}
	}
	switch {
	case wanted == 0 || c.contexts == 0:
		return fail(eInval, "no metadata context was chosen")
	case length == 0:
		return fail(eInval, "a BLOCK_STATUS of no bytes")
	}
	if !c.extended {
		length = min(length, math.MaxUint32)
	}
	if err := run.begin(); err != nil {
		return err
	}
	defer c.disk.End()
	for id := uint32(0); wanted != 0; id++ {
		if !wanted.has(id) {
			continue
		}
		run.enter()
		extents, err := run.extents(id, int64(off), int64(length))
		run.Leave()
		if err != nil {
			return err
		}
		wanted &^= 1 << id
		if err := run.answerStatus(id, extents, wanted == 0); err != nil {
			return err
		}
	}
	return nil
}

// extents are the extents of a context: at least one, and possibly not for all of the range.
func (run *run) extents(id uint32, off, length int64) (all []extent, err error) {
	most := maxExtents
	if run.req.flags&cmdFlagReqOne != 0 {
		most = 1
	}
	for length > 0 {
		if err := run.permitted(); err != nil {
			return nil, err
		}
		e, err := run.extent(id, off, length)
		if err != nil {
			return nil, err
		}
		all = appendExtent(all, e)
		if len(all) > most {
			return all[:most], nil
		}
		off, length = off+int64(e.length), length-int64(e.length)
		runtime.Gosched() // let short requests come in between
	}
	return all, nil
}

// extent is the extent of a context that begins at off, or a part of it.
func (run *run) extent(id uint32, off, length int64) (extent, error) {
	d := run.c.disk
	switch {
	case id >= contextBitmap:
		since := run.c.snapshots[id-contextBitmap]
		changed, n, err := d.History.Changed(context.Background(), since.ID, off, length)
		if err != nil {
			return extent{}, fail(eInval, "%v", err)
		}
		if changed {
			return extent{uint64(n), stateDirty}, nil
		}
		return extent{length: uint64(n)}, nil
	case id == contextDepth && d.Layers == nil:
		return extent{uint64(length), disk.DepthOwn}, nil
	case id == contextDepth:
		depth, n, err := run.r.Depth(d, off, length)
		return extent{uint64(n), uint32(depth)}, err
	case d.Extents == nil:
		return extent{length: uint64(length)}, nil
	}
	e, err := run.r.Extent(d, off, length)
	if e.Data {
		return extent{length: uint64(e.Length)}, err
	}
	return extent{uint64(e.Length), stateHole | stateZero}, err
}

// appendExtent joins neighbours of one kind.
func appendExtent(all []extent, e extent) []extent {
	if n := len(all); n > 0 && all[n-1].flags == e.flags {
		all[n-1].length += e.length
		return all
	}
	return append(all, e)
}
