// Package identity makes what a VMIdentity needs: a claim for the data and a secret with a CHAP
// credential, both named vmid-NAME. It grows the claim, says in conditions what is wrong, and
// removes both when the identity is deleted and no pod uses them.
//
// # What may be lost, and what not
//
// Data is in the claim, so the claim is made once. The claim is created, and never applied over one
// that exists: a claim that was not made for this very identity is not touched. When a claim that
// was ready has gone, its data has gone, and the identity says so instead of starting with an empty
// disk.
//
// # Secrets are written and never read
//
// The controller may create and delete secrets, and not get them. So whether a secret that exists
// is its own follows from the order of the steps: a create that is only tried (dry run) finds a
// stranger's secret before anything is made; then the claim is made, which can be read and names
// its owner; then the secret. From the claim on, a secret that exists is the identity's own.
//
// Each step may be the last before the process is killed. The next reconcile finds what there is
// and goes on. A status is written against the version that was read, so two controllers that
// run at once cannot overwrite each other.
package identity
