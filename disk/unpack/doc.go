// Package unpack unwraps disks from what publishers wrap them in: gzip, xz, zstd and bzip2, a tar
// archive with one disk in it. The content decides, and never a name. Everything is read once, from
// its beginning to its end, and nothing is written to a temporary file:
//
//	c, err := unpack.Open("fedora.tar.xz", in, -1, unpack.Options{})
//	defer c.Close()
//	io.Copy(to, c)   // the disk; an error at the end says what is wrong with the wrapping
//
// The data is not trusted. Options bound the memory. The caller has to bound the size of the disk:
// a few bytes can be many zeros.
package unpack
