// Package plan decides what a run of serve serves, before anything is served.
//
// A daemon finds images (package sources), and Make turns them and the options into a Plan: each
// disk with its number, its settings and its directory. Make checks all of it before the first disk
// is made, so that a mistake leaves nothing behind. It reads directories and images, and writes and
// starts nothing. When the disks are open, Made records their directories.
//
// MakeRoom explains to a person that disks do not fit, because the explanation follows from the
// plan. Settle is pure: a reload calls it with other settings.
package plan
