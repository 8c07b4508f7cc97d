// Package rawfile makes disks of raw files, and writes raw files fast.
//
// Open makes a disk.Disk of a file. A Writer finds out which way to write is the fastest, through
// the page cache or past it; Places gives ranges their place before they are written, where the
// file system gains by it. What goes past the cache and what goes through it never meet: see
// cacheGuard.
package rawfile
