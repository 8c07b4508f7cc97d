// Package signature decides whose signature an image needs, finds the signatures stored with images
// in registries, checks them, and makes them. It knows cosign's formats and keys, and no disks.
// Package transport calls it, as the Gate through which every reader of an image passes.
//
//	keys.go      public and private keys in PEM, and what a signature is to them
//	policy.go    which keys are required, by repository
//	evidence.go  a stored signature, and whether it is one of an image
//	find.go      where signatures of an image are
//	gate.go      the decision about an image
//	sign.go      a signature is stored with an image
//
// There are two formats. The older one is a payload in the format of simple signing, which has the
// digest of a manifest (containers-signature(5)). It is a layer of the manifest with the tag
// sha256-HEX.sig, and its signature is an annotation of that layer. The newer one is a bundle of
// sigstore (sigstore_bundle.proto, version 0.3, as JSON) in a manifest that refers to the image.
//
// A registry may send anything. So everything is bounded, in size and in number, before it is read.
// An image is only admitted by a signature of its exact digest, by a key that a person has named.
// If a registry cannot be asked, the error is another one, and asking again may help; it is never a
// *RefusedError.
package signature
