// Package options has the options of a daemon: images, directories, ports, the settings of disks,
// and the names that a person uses for them.
//
// Commands fill in Options, and daemon.New completes them by Resolve. From then on they do not
// change, and every part of a daemon reads them. Messages that ask for another value name its
// setting by Options.Setting. The places of disks follow from the options alone (places.go). The
// package opens and starts nothing.
package options
