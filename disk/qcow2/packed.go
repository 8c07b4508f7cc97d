package qcow2

import (
	"context"
	"fmt"
)

const (
	// maxPacked is how many bytes of compressed data are read at once, unless a single cluster has
	// more.
	maxPacked = 512 << 10
	// maxPackedGap is the largest gap between the data of two clusters that is read along rather
	// than skipped. Bytes.
	maxPackedGap = 16 << 10
	// maxPackedRun is the largest number of clusters whose data is read at once.
	maxPackedRun = 64
)

// readCompressed reads from a compressed cluster. It goes on with the next ones if they are wanted
// whole and lie together. It returns how many bytes it read. A cluster that is wanted in part is
// kept, so a series of small reads decodes it once. If the read begins in the middle of a cluster,
// only the part up to its end is decoded, because such a reader usually goes on elsewhere. A second
// such read decodes the whole cluster.
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

// readPacked reads whole compressed clusters from off on with one read of the file. Clusters that
// follow each other in the guest mostly do so in the file.
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

// packedRun fills entries with those of the guest cluster, which is compressed, and of the
// following clusters. It stops before the first whose data does not lie behind the others. It
// returns the number of entries, at least one.
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

// storedRange returns where an entry's compressed data lies in the file. The file may end within
// the last sector of the data. A table that was read again may have changed since it was validated.
// Data past the end of the file is then empty.
func (im *Image) storedRange(entry uint64) (begin, end int64) {
	off, length := im.hdr.compressedRange(entry)
	return off, max(off, min(off+length, im.fileSize))
}
