// Package volume is the life of volumes that are made on demand: they are created, found again
// after a restart, filled, enlarged and deleted.
//
// A daemon makes a Manager from a directory and an implementation of Disks, and calls Load before
// initiators can log in. From then on any number of goroutines may call Put, Get, List and Delete;
// most of these calls come from volume/server. The receiver of uploads calls Fill. Close comes
// last, when nobody calls the Manager any more.
//
// It guarantees that a volume is there completely or not at all, also after a kill. What was
// answered survives a crash of the machine: the volume keeps its name, its LUN and its identity. No
// two volumes have one LUN, and a LUN that has become free is not given to another volume soon (see
// volume/store). Operations on one volume run one after the other, and do not wait for those on
// others.
//
// Its errors are for people and programs. Errors about a request are *api.Error.
package volume
