// Package signature decides by whose signature an image may be read, finds the signatures that lie
// beside images in registries, checks them, and makes them. It knows cosign's formats and keys, and
// no disks. Package transport calls it, as the Gate through which every reader of an image passes.
//
//	keys.go      public and private keys in PEM, and what a signature is to them
//	policy.go    which keys are asked for, by repository
//	evidence.go  a signature as it is stored, and whether it is one of an image
//	find.go      where signatures of an image lie
//	gate.go      the decision about an image
//	sign.go      a signature is stored beside an image
//
// There are two formats. The older one is a payload in the format of simple signing, which names
// the digest of a manifest (containers-signature(5)), and its signature in an annotation of the
// layer that has the payload, in the manifest that the tag sha256-HEX.sig names. The newer one is a
// bundle of sigstore (sigstore_bundle.proto, version 0.3, as JSON) in a manifest that refers to the
// image.
//
// A registry may send anything. So everything is bounded, in size and in number, before it is read.
// Nothing that it sends makes an image admissible but a signature of the very digest, by a key that
// a person has named. A registry that cannot be asked is an error of its own, after which it is
// worth asking again; it is never a *RefusedError.
package signature
