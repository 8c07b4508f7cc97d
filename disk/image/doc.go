// Package image recognises, validates and reads disk images that come from strangers: qcow2 with
// its backing files, and raw.
//
// ScanDir, ScanFiles or Open gives an Image, whose whole metadata has been checked by then. It is
// read as a disk by any number of goroutines, never written, and closed once. Convert and Stream
// expand it, ConvertQcow2 and Store make a qcow2 image of it, and all tell a Progress how far they
// are.
//
// The files of an image are read from a Source each: a file of this machine, or for OpenSource
// whatever its caller gives, such as a blob of a registry. A source may be far away. Reading then
// waits as long as a context lasts, and says disk.ErrNotNow when that ends; a range that is lost is
// a *disk.MediumError.
//
// Who keeps a disk that was made of an image knows it again by its Fingerprint: the hash of the
// content of each of its files. A Hash is run beside the guest, and a ReadAlong gives it what is
// copied anyway.
//
// What was once served raw stays raw, whatever a guest has written there since: Image.OpenRaw and
// Image.RememberRaw.
package image
