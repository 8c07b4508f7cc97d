// Package transfer moves the disk of a volume to another one: the files of a persistent directory,
// as they are, with their holes.
//
// Send writes one stream, and Receive makes the files of it. Of an incomplete overlay, only the
// blocks that it has are sent, with its map. Nobody may use the disk meanwhile: both sides take the
// lock that the daemon takes. The source is only read.
//
// Receive writes into a subdirectory, syncs it, reads it again from storage, compares digests, and
// gives the files their names last. So a disk that was received in part has no name by which it
// could be served.
//
// A killed daemon may have marked writes that no guest has flushed. The map with these marks counts
// only on its own volume, and is not sent. The disk is then as after a crash of the machine.
//
// Serve and Fetch connect both sides by TLS 1.3, with a key that each side makes of one secret. A
// client that does not know the secret gets no data.
package transfer
