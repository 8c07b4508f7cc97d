// Package export commits the disk of an identity to an image in a registry, as spec.export
// requests. A Job does it, with the claim and the secret in the spec. The controller reads no
// secret.
//
// A disk has one user. So the controller first writes into the status that the disk belongs to the
// Job. This write fails if a pod has got the disk meanwhile, and package pod lets no pod start
// until the entry is gone. The name of the Job has a hash of the request, so another export has
// another name. The Job of an earlier export is deleted, and its pods have ended, before the next
// begins.
//
// A failed Job stays, with its pods' logs. When it is deleted, or the spec changes, the export
// begins again. A complete one is not repeated.
package export
