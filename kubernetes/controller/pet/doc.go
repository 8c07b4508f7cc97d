// Package pet makes a VMIdentitySet and a StatefulSet with one pod from each VMPet.
//
// Both have the name of the pet and belong to it, so they are deleted with it. The VMIdentity also
// has that name, but no owner: the disk stays when the pet is deleted, and a new pet of the same
// name gets it again. A pet that does not run has a StatefulSet without a pod.
package pet
