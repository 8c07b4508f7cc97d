// Package verify asks whose signature the image of an identity must have, and looks for it before
// anything uses the image: the kubelet mounts images, and no daemon of ours sees them before a
// guest does.
//
// The cluster's administrator writes the policies, in files of the controller, and says by a label
// of a namespace which one holds there. A tenant can change neither. A policy that cannot be read,
// or does not exist, admits nothing.
//
// The status of an identity names the key that has signed its image. That the image has this
// signature stays true: the image is named by its digest. Whether the key is one that is asked for
// is looked up in the policy of the moment, each time that somebody is about to use the image
// (Verifier.Hold). So a restart needs no registry, and a key that was taken out counts no longer.
//
// Only registries are asked for whose images the policy names keys: a tenant cannot let the
// controller send requests to other places.
package verify
