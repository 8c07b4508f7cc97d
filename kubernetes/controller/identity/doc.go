// Package identity makes the objects that a VMIdentity needs: a claim for the data and a secret
// with a CHAP credential, both named vmid-NAME. It grows the claim, reports problems in conditions,
// and removes both objects when the identity is deleted and no pod uses them.
//
// # What may be lost, and what not
//
// The data is in the claim, so the claim is made only once. It is created, and never applied over
// an existing one: the package does not touch a claim that was not made for this very identity. If
// a claim was ready and is gone, its data is gone. The identity then reports this instead of
// starting with an empty disk.
//
// # Secrets are written and never read
//
// The controller may create and delete secrets, but not read them. So the order of the steps shows
// whether an existing secret is its own. First, a dry run of the create detects a secret of another
// owner before anything is made. Then the claim is made, which can be read and names its owner.
// Then comes the secret. Once the claim exists, an existing secret is the identity's own.
//
// The process may be killed after each step. The next reconcile finds the existing objects and goes
// on. A status is written with the version that was read, so two controllers that run at once
// cannot overwrite each other.
package identity
