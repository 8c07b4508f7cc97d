// Package image recognises, validates and reads disk images of unknown origin: raw, and qcow2 with
// backing files.
//
// ScanDir, Open and OpenSource return images whose metadata is completely validated. Any number of
// goroutines may read an Image as a disk. It is never written, and it is closed once. Convert and
// Stream expand an image. ConvertQcow2 and Store make a qcow2 image of it. All of them tell a
// Progress how far they are.
//
// The files of an image are read from a Source each: a file of this machine or, for OpenSource,
// whatever its caller provides, such as a blob of a registry. A source may be far away. A read then
// waits as long as its context lasts, and returns disk.ErrNotNow when the context ends. A range
// that is lost is a *disk.MediumError.
//
// A disk that was made of an image recognises it again by its Fingerprint: the hash of the content
// of each of its files. A Hash runs beside the guest. A ReadAlong gives it the data that is copied
// anyway.
//
// A file that was once served raw stays raw, whatever a guest has written into it: see
// Image.OpenRaw and Image.RememberRaw.
package image
