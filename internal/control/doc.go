// Package control is the control socket of a daemon: what the commands handover, sessions and kick
// ask, and how the daemon answers.
//
// A daemon makes a Server for its target before it serves, so that handovers that were open at the
// last stop go on, lets it Listen at a path, and closes it before it stops. A command makes a
// Client with the same path.
//
// The socket obeys the daemon's own user and root only, whom the kernel names: there is no secret
// to hand out, and what everybody may open is still nobody else's. It is HTTP with JSON.
package control
