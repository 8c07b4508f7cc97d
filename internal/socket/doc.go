// Package socket has the connections of the protocols that serve disks. A Socket keeps Go's poller
// from waking a thread for each piece of data that arrives while its reader is busy, and polls for
// a moment before it waits. Front ends make a Socket of each connection whose peer has introduced
// itself. If that is impossible, they use Plain.
package socket
