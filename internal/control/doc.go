// Package control is the control socket of a daemon. It carries the requests of the commands
// handover, sessions, kick, snapshot and commit, and the daemon's answers, as JSON over HTTP.
// Package status has their types.
//
// A daemon makes a Server for its disks in use and its target before it serves, so that open
// handovers continue after a restart. It lets the server Listen at a path, and closes it before it
// stops. A command makes a Client with the same path.
//
// The socket accepts only the daemon's own user and root, as the kernel reports them. So no secret
// is needed, and other users cannot use it even if they can open the socket.
package control
