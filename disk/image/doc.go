// Package image recognises, validates and reads disk images of unknown origin: raw, and qcow2 with
// backing files.
//
// ScanDir, Open and OpenSource return images whose metadata is completely validated. Any number of
// goroutines may read an Image as a disk. Nobody writes it. Convert and Stream expand an image.
// ConvertQcow2 and Store make a qcow2 image of it. All of them report to a Progress how far they
// are.
//
// Each file of an image is read from a Source: a file of this machine or, for OpenSource, anything
// that its caller provides, such as a blob of a registry. A source may be far away. Then a read
// waits as long as its context lasts, and returns disk.ErrNotNow when the context ends. The error
// for a range that is lost is a *disk.MediumError.
//
// A disk that was made of an image recognises the image again by its Fingerprint: the hash of the
// content of each of its files. A Hash is computed while the guest works. A ReadAlong gives it the
// data that is copied anyway.
//
// A file that was once served raw stays raw, whatever a guest has written into it: see
// Image.OpenRaw and Image.RememberRaw.
package image
