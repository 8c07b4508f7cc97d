// Package control is the control socket of a daemon. It carries the requests of the commands
// handover, sessions, kick, snapshot and commit, and the daemon's answers, as JSON over HTTP.
// Package status has their types.
//
// A daemon makes a Server for its disks in use and its target before it serves, so that open
// handovers continue after a restart. It lets the server Listen at a path, and closes it before it
// stops. A command makes a Client with the same path.
//
// The socket obeys only the daemon's own user and root, as the kernel names them. So there is no
// secret to hand out, and a socket that others can open does not help them.
package control
