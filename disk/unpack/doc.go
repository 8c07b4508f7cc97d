// Package unpack takes off what publishers wrap disks in: gzip, xz, zstd and bzip2, a tar
// archive with one disk in it. The content decides, and never a name. Everything is read once, from
// its beginning to its end, and nothing is kept aside:
//
//	c, err := unpack.Open("fedora.tar.xz", in, -1, unpack.Options{})
//	defer c.Close()
//	io.Copy(to, c)   // the disk; an error at the end says what is wrong with the wrapping
//
// What comes is not trusted. Memory is bounded by Options, and what a disk may have is for the
// caller to bound: a few bytes can be many zeros.
package unpack
