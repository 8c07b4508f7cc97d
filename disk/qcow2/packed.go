package qcow2

import (
	"context"
	"fmt"
)

const (
	// maxPacked is how much compressed data is read at once, where one cluster's is not more.
	// Bytes.
	maxPacked = 512 << 10
	// maxPackedGap is what is rather read in vain, between two clusters' data, than read around.
	// Bytes.
	maxPackedGap = 16 << 10
	// maxPackedRun is how many clusters' data are read at once at most.
	maxPackedRun = 64
)

// readCompressed reads from a compressed cluster, and from those after it as long as they are
// wanted whole and lie together. It returns how many bytes it read. One that is wanted in part is
// kept, so that reading on in small steps decodes it once. One that is read somewhere in its middle
// is decoded as far as that, as whoever reads so reads elsewhere next; a second such read decodes
// it whole.
func (im *Image) readCompressed(ctx context.Context, p []byte, off int64, entry uint64) (
	int, error,
) {
	size := im.hdr.clusterSize()
	within := off & (size - 1)
	if within == 0 && int64(len(p)) >= size {
		return im.readPacked(ctx, p, off)
	}
	need := min(within+int64(len(p)), size)
	if within == 0 || need > size*3/4 || !im.codec.stopsEarly() {
		need = size
	}
	b, err := im.decoded.get(ctx, off>>im.hdr.clusterBits, entry, need)
	if err != nil {
		return 0, err
	}
	n := copy(p, b.data[within:])
	b.release()
	return n, nil
}

// readPacked reads whole compressed clusters, the first one at off, with one read of the file.
// Which ones lie behind it in the guest's order mostly lie so in the file.
func (im *Image) readPacked(ctx context.Context, p []byte, off int64) (int, error) {
	h := im.hdr
	size := h.clusterSize()
	var entries [maxPackedRun]uint64
	most := min(int64(len(p))/size, maxPackedRun)
	run, err := im.packedRun(ctx, entries[:most], off>>h.clusterBits)
	if err != nil {
		return 0, err
	}
	begin, end := im.storedRange(entries[0])
	for _, e := range entries[1:run] {
		_, last := im.storedRange(e)
		end = max(end, last)
	}
	b := im.codec.input(end - begin)
	defer im.codec.release(b)
	if err := readFull(ctx, im.r, *b, begin); err != nil {
		return 0, fmt.Errorf("reading compressed data at %#x: %w", begin, err)
	}
	for i, e := range entries[:run] {
		from, to := im.storedRange(e)
		if err := im.codec.decode(p[int64(i)*size:][:size], (*b)[from-begin:to-begin], from); err !=
			nil {
			return i << h.clusterBits, err
		}
	}
	return run << h.clusterBits, nil
}

// packedRun fills entries with those of the guest cluster, which is compressed, and the ones after
// it, up to the first that does not lie behind the others. It returns how many there are, at least
// one.
func (im *Image) packedRun(ctx context.Context, entries []uint64, cluster int64) (int, error) {
	perTable := im.hdr.l2Entries()
	index := cluster / perTable
	table, err := im.tables.get(ctx, index, im.l1[index]&offsetMask, im.hdr.clusterSize())
	if err != nil {
		return 0, err
	}
	defer table.release()
	first := cluster % perTable
	entries = entries[:min(int64(len(entries)), perTable-first)]
	var begin, end int64
	for i := range entries {
		e := im.hdr.entry(table.data, first+int64(i))
		from, to := im.storedRange(e)
		switch {
		case i == 0:
			begin, end = from, to
		case e&entryCompressed == 0 || from < begin || from > end+maxPackedGap ||
			to-begin > maxPacked:
			return i, nil
		}
		end = max(end, to)
		entries[i] = e
	}
	return len(entries), nil
}

// storedRange is where an entry's compressed data lies in the file, which may end within its last
// sector. A table that was read again may have been changed since it was validated: what would lie
// behind the end is no data at all.
func (im *Image) storedRange(entry uint64) (begin, end int64) {
	off, length := im.hdr.compressedRange(entry)
	return off, max(off, min(off+length, im.fileSize))
}
