// Package daemon is one run of serve: disks of images, the target that serves them as LUNs, the
// pages, the control socket, the ready file, and the drain at the end.
//
// A program makes a Daemon of Options and calls Run, which serves until its context ends. Meanwhile
// Ready tells when every LUN can be used, Status what there is, Reload takes up new settings,
// ReplaceCredentials new credentials, and Add and Remove change the LUNs. Signals, files of
// settings and the environment are the program's; so is the log.
//
// Run does things in this order, and what fails undoes what was done:
//
//   - the pages and the portals are bound, so that a port that is taken is known at once
//   - the images are found, those in registries after those on this machine, and all of them are
//     validated before the first disk is made
//   - each disk is opened (disks.go); what is known of it by then is on the pages
//   - the volumes that were made on demand are served again (volumes.go), and can be asked for
//   - the portals accept connections, the state is ready, and the ready file is made
//   - when the context ends: the ready file goes, volumes cannot be asked for any more, the
//     initiators are asked to log out, their commands end, the disks are flushed and closed
//
// What it guarantees: Run returns nil only if nothing is lost that an initiator was told is
// durable. Several daemons in one process share nothing, as long as their options do not: this
// package has no state.
package daemon
