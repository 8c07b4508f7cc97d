// Package options are what a daemon is told: images, directories, ports, the settings of disks, and
// what a person calls each of them.
//
// Commands fill in Options, and daemon.New completes them by Resolve. From then on they do not
// change, and every part of a daemon reads them. Messages that ask for another value name its
// setting by Options.Setting. Where disks lie follows from the options alone (places.go). The
// package opens and starts nothing.
package options
