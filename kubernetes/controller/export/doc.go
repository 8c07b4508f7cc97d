// Package export commits the disk of an identity to an image in a registry, as spec.export asks. A
// Job does it, with the claim and the secret that the spec names. The controller reads no secret.
//
// A disk has one user. So the status says first that the disk belongs to the Job, by a write that
// fails if a pod has got the disk meanwhile, and package pod lets no pod start until it no longer
// says so. The name of the Job has a hash of what the spec asks for: another export has another
// one. The Job of an earlier export is deleted, and its pods have ended, before the next begins.
//
// A Job that has failed stays, with its pods' logs. When it is deleted, or the spec changes, the
// export begins again. One that is complete is not repeated.
package export
