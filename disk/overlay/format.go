package overlay

// A map file says which blocks of an image the disk's own file has. It begins with a header, and a
// page of the map follows in each 4 KiB. Numbers are little-endian. What is not drawn is zero, and
// what was never written is a hole of the file.
//
//	    0 +--------------------------------------------------+
//	      | magic "KVDMAP1\n"                                |
//	    8 | size of a block, bytes                           |
//	   16 | how many blocks the image has                    |
//	   24 | identifier of the disk's map, 16 bytes           |
//	   40 | boot of the kernel, 36 characters      (live)    |
//	   80 | volume, up to 48 characters            (live)    |
//	 1024 | a bit for each page: it was full when the file   |
//	      | was made, so it is not stored below              |
//	 4088 | xxhash64 of the bytes before                     |
//	 4096 +--------------------------------------------------+
//	      | page 0: a bit for each of blocks 0 to 32767;     |
//	      | 1: the disk's own file has it, 0: the image      |
//	 8192 +--------------------------------------------------+
//	      | page 1: blocks 32768 to 65535                    |
//	12288 +--------------------------------------------------+
//	      | ...                                              |
//
// Bits are only ever set, never cleared. So a write that is cut off leaves an older map, which is
// right, too: it lacks blocks that nobody was promised. The header stays as it is, unless a flush
// fails: then that of the live file becomes zeros, and the file counts no more.
//
// A disk has one or two such files. The live one gets each change at once and is never synced: it
// is right while the kernel runs. It counts only in the boot and on the volume that its header
// names. The durable one, without these two fields, gets pages when the disk is flushed, after the
// data.
const (
	mapMagic        = "KVDMAP1\n"
	mapGranuleBegin = 8
	mapBlocksBegin  = 16
	mapIDBegin      = 24
	mapBootBegin    = 40
	mapBootLength   = 36
	mapVolumeBegin  = 80
	mapVolumeLength = 48
	mapFullBegin    = 1 << 10
	mapFullLength   = maxMapBlocks / mapPageBlocks / 8
	mapHeaderBody   = mapHeaderSize - 8
	mapHeaderSize   = 4 << 10

	// A page has so many words, blocks and bytes, in memory as in a file.
	mapPageWords  = 512
	mapPageBlocks = mapPageWords * 64
	mapPageSize   = mapPageWords * 8
)
