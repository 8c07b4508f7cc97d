package qcow2

// Need is what a read has to get from the image's file for the first of its bytes.
type Need struct {
	N    int64 // bytes of the guest, all of one kind
	Kind Kind
	// Where the bytes lie in the file, or those that have to be decompressed. Length is 0 if nothing is
	// read: there are zeros, or what was just decompressed for another read, or the backing file has it.
	Off, Length int64
}

// Need tells what a read at off needs, which is for at most length bytes. Not ok: it has to read a table first,
// or there is nothing at off. It waits neither for the file nor for another read.
func (im *Image) Need(off, length int64) (need Need, ok bool) {
	h := im.hdr
	if off < 0 || off >= h.size {
		return Need{}, false
	}
	length = min(length, h.size-off)
	cluster, perTable := off>>h.clusterBits, h.l2Entries()
	index := cluster / perTable
	if im.l1[index]&offsetMask == 0 {
		return Need{N: min(length, (index+1)*perTable<<h.clusterBits-off)}, true
	}
	table, ok := im.tables.peek(index)
	if !ok {
		return Need{}, false
	}
	defer table.release()
	within := off & (h.clusterSize() - 1)
	p := h.entryPiece(table.data, cluster%perTable, within).clip(length)
	need = Need{N: p.n, Kind: p.kind}
	switch {
	case p.kind == KindData:
		need.Off, need.Length = p.host, min(p.n, max(im.fileSize-p.host, 0))
	case p.kind == KindCompressed && !im.decoded.has(cluster, within+p.n):
		begin, end := im.storedRange(p.entry)
		need.Off, need.Length = begin, end-begin
	}
	return need, true
}
