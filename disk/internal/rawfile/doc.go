// Package rawfile serves raw files as disks, and writes raw files fast.
//
// Open makes a disk.Disk of a file. A Writer finds out which way to write is fastest, through the
// page cache or past it. Places preallocates ranges on file systems where that helps. Writes past
// the cache and writes through it never touch the same region: see cacheGuard.
package rawfile
