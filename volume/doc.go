// Package volume manages volumes that are made on demand. It creates them, finds them again after a
// restart, fills, enlarges and deletes them.
//
// A daemon makes a Manager from a directory and an implementation of Disks, and calls Load before
// initiators can log in. From then on any number of goroutines may call Put, Get, List and Delete;
// most of these calls come from volume/server. The receiver of uploads calls Fill. Close comes
// last, when nobody calls the Manager any more.
//
// It guarantees that a volume exists completely or not at all, even after a kill. The result of an
// answered request survives a crash of the machine: the volume keeps its name, its LUN and its
// identity. No two volumes have the same LUN, and a freed LUN is not given to another volume soon
// (see volume/store). Operations on one volume run one after the other. They do not wait for
// operations on other volumes.
//
// Its errors are for people and programs. Errors about a request are *api.Error.
package volume
