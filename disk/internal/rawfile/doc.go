// Package rawfile serves raw files as disks, and writes raw files fast.
//
// disk/instance calls Open, which makes a disk.Disk of a file. disk/image writes the expanded
// content through a Writer, and disk/overlay the content that it copies while a guest runs. A
// Writer finds out which way to write is the fastest: through the page cache or past it. Places
// preallocates ranges on file systems where that helps.
//
// Writes past the cache and writes through it never touch the same region: see cacheGuard.
package rawfile
