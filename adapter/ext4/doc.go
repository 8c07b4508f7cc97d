// Package ext4 writes an ext4 file system level by level, without mounting anything.
//
// A Writer keeps the tree in memory. Begin starts a level, methods such as Create and Remove change
// the tree, and Finish writes every block that differs from the level before. So the blocks of a
// level depend only on the changes in it and in the levels below it: not on the time, the machine
// or the size of the disk. Two images with the same lower layers have the same lower levels, byte
// for byte.
//
// Blocks and inodes are allocated in ascending order. The guest can use freed ones, but the Writer
// does not allocate them again, so that the content of a block never moves.
//
// The layout, in blocks of 4 KiB and groups of 32,768 blocks. Sixteen groups share their tables, as
// the feature flex_bg allows:
//
//	group 0    superblock | descriptors | room for descriptors, to block 128 | tables of the
//	           groups 0 to 15 | journal | data
//	group 16   tables of the groups 16 to 31 | data
//	...
//	1, 3^n, 5^n, 7^n   begin with a copy of the superblock and of the descriptors (sparse_super)
//
//	tables     a block bitmap for each group | an inode bitmap for each | an inode table for each
//
// A group without content has no bitmaps and no inode table. Flags in its descriptor say so
// (BLOCK_UNINIT, INODE_UNINIT), and another says that its inode table reads as zeros
// (INODE_ZEROED), so a guest has nothing to clear when it mounts the file system. There are always
// enough groups that a quarter is free. The guest can add more while it runs.
//
// The structures are those of the kernel's Documentation/filesystems/ext4. Numbers are
// little-endian, except in the journal. The checksums are those of metadata_csum.
package ext4
