// Package volume is the life of volumes that are made on demand: they are created, found again
// after a restart, filled, enlarged and deleted.
//
// A daemon makes a Manager of a directory and of what makes disks (Disks), and calls Load before
// initiators can log in. From then on any number of goroutines call Put, Get, List and Delete,
// mostly those of volume/server. What receives data calls Fill. Close is called last, when nothing
// is asked of the Manager any more.
//
// What it guarantees: a volume is there whole, or nothing of it, also when the process is killed in
// between. What was answered survives a crash of the machine: the volume has its name, its LUN and
// its identity again. No two volumes have one LUN, and no LUN gets another volume soon (see
// volume/store). What happens to one volume happens in turn, and does not wait for others.
//
// Its errors are for people and programs: those that are about a request are *api.Error.
package volume
