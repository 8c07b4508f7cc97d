package qcow2

import "context"

// Place is where an image stores a cluster of its guest. All numbers are bytes.
type Place struct {
	Guest int64
	Kind  Kind
	// Host and Length are where its content lies in the file. KindCompressed: the content may end
	// earlier. KindZero: it lies nowhere.
	Host, Length int64
}

// Places calls visit for each cluster that is not the backing file's, in the guest's order, until
// visit returns false. An image with subclusters says nothing. As reading does, it may wait for
// tables.
func (im *Image) Places(ctx context.Context, visit func(Place) bool) error {
	h := im.hdr
	if h.extended() {
		return nil
	}
	for off := int64(0); off < h.size; {
		table, first, limit, err := im.tableAt(ctx, off, h.size-off, false)
		if err != nil {
			return err
		}
		if table.data == nil {
			off += limit
			continue
		}
		for i := first; limit > 0; i++ {
			e := h.entry(table.data, i)
			p := Place{Guest: off, Kind: entryKind(e)}
			switch p.Kind {
			case KindData:
				p.Host, p.Length = int64(e&offsetMask), h.clusterSize()
			case KindCompressed:
				p.Host, p.Length = h.compressedRange(e)
			}
			if p.Kind != KindUnallocated && !visit(p) {
				table.release()
				return nil
			}
			off += h.clusterSize()
			limit -= h.clusterSize()
		}
		table.release()
	}
	return nil
}
