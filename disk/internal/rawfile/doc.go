// Package rawfile serves raw files as disks, and writes raw files fast.
//
// disk/instance calls Open, which makes a disk.Disk from a file, and closes it after every other
// call has returned. disk/image writes the expanded content through a Writer, and disk/overlay the
// content that it copies beside a guest. A Writer finds out which way to write is fastest, through
// the page cache or past it. Places preallocates ranges on file systems where that helps.
//
// Guarantee: writes past the cache and writes through it never touch the same region: see
// cacheGuard.
package rawfile
