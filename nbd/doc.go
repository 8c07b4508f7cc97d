// Package nbd serves disks in use by the NBD protocol, as its specification (doc/proto.md of
// NetworkBlockDevice/nbd) has it: fixed newstyle negotiation with TLS, structured replies, extended
// headers, metadata contexts, and every request but RESIZE.
//
// A Server is a serving.Front. The daemon makes one for its serving.Disks and calls Serve for each
// portal. Every disk is an export: by its name, which is an image's or a volume's, and by its
// number. The promises of package serving hold: a write-exclusive disk has one owner, of any
// protocol, fenced clients change nothing, and a removal waits for requests under way.
//
// Each connection has one reading goroutine, which executes requests itself: see serving.Reader.
// Replies are queued, and one system call writes all of them before the reader waits for the
// network again. A request allocates nothing.
package nbd
