// Package plan decides what a run of serve serves, before anything is served.
//
// A daemon finds images (package sources), and Make turns them and the options into a Plan: each
// disk with its number, its settings and the directory in which it lies. Make checks all of it
// before the first disk is made, so that a mistake leaves nothing behind. It reads directories and
// images, and writes and starts nothing. When the disks are open, Made remembers where they lie.
//
// What a failure of a disk means to a person is said here, too, where it follows from the plan:
// MakeRoom when disks do not fit. Settle is pure: a reload asks it what other settings would mean.
package plan
