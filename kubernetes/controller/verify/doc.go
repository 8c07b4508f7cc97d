// Package verify finds the policy for the signature of an identity's image, and looks for the
// signature before the image is used: the kubelet mounts images, and a guest reads them before any
// of our daemons.
//
// The cluster's administrator writes the policies, in files of the controller, and selects one by a
// label of a namespace. A tenant can change neither. A policy that cannot be read, or does not
// exist, admits no image.
//
// The status of an identity names the key that has signed its image. This stays true, because the
// image is named by its digest. Each time that the image is about to be used (Verifier.Refuse), the
// present policy decides whether this key is accepted. So a restart needs no registry, and a
// removed key is not accepted any more.
//
// Only registries for whose images a policy has keys are asked: a tenant cannot let the controller
// send requests to other places.
package verify
