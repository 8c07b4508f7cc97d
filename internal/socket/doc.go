// Package socket has the connections of the protocols that serve disks. A Socket keeps Go's poller
// from waking a thread for each piece of data that arrives while its reader is busy, and polls for
// a moment before it waits. Front ends make one of each connection that has introduced itself, and
// go on with Plain where that is impossible.
package socket
