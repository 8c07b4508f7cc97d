// Package daemon is one run of serve: disks of images, the target that serves them as LUNs, the
// pages, the control socket, the ready file, and the drain at the end.
//
// A program makes a Daemon from options (package options) and calls Run, which serves until its
// context ends. Ready is closed when every LUN can be used, Status returns the state, Reload
// applies new settings, and ReplaceCredentials new credentials. The program handles signals,
// settings files, the environment and the log.
//
// Packages of their own have the steps of a disk, and each knows only those before it: sources
// finds images, plan decides how each is served, served has the disks while they are served, and
// volumes makes more of them on demand. The Daemon connects these, and has the ports, the state and
// the ready file.
//
// Run does things in this order. If a step fails, the steps before it are undone:
//
//   - the pages and the portals are bound, so that a taken port is known at once
//   - volumes made on demand are found, since no image may get their numbers
//   - the images are found, those in registries after those on this machine, and all of them are
//     validated before the first disk is made
//   - each disk is opened; the pages show the disks that are already known
//   - the volumes are served again, and requests for them answered
//   - the portals accept connections, the state is ready, and the ready file is made
//   - when the context ends: the ready file goes, volumes cannot be asked for any more, the
//     initiators are asked to log out, their commands end, the disks are flushed and closed
//
// It guarantees that Run returns nil only if no data is lost that was acknowledged as durable.
// Several daemons in one process share nothing, as long as their options do not: this package has
// no state.
package daemon
