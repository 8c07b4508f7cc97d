// Package transfer moves the disk of a volume to another one: the files of a persistent directory,
// as they are, with their holes.
//
// Send writes one stream, and Receive makes the files of it. Of an incomplete overlay only what it
// has is sent, with its map. Nobody may use the disk meanwhile: both sides take the lock that the
// daemon takes. The source is only read.
//
// Receive writes into a directory below, syncs it, reads it again from the storage, compares
// digests, and gives the files their names last. So a disk that was received in part has no name
// by which it could be served.
//
// What a killed daemon knew of writes that no guest has flushed stays behind, as if the machine had
// crashed: the map that has it counts on its own volume only.
//
// Serve and Fetch connect the two: by TLS 1.3, with a key that each side makes of one secret. Who
// does not know the secret is told nothing.
package transfer
