// Package chap authenticates iSCSI initiators to the target, and the target to initiators, by CHAP
// (RFC 1994; RFC 7143 9.2.1 and 12.1.3). It also reads the credentials from the environment.
//
// One Authenticator serves all logins of a target. Each login runs one Exchange:
//
//	initiator                               target
//	CHAP_A=<algorithms, in order>      ->   Exchange.Start
//	                                   <-   CHAP_A=<one> CHAP_I=<identifier> CHAP_C=<challenge>
//	CHAP_N=<user> CHAP_R=<response>    ->   Exchange.Verify
//	[CHAP_I=<identifier> CHAP_C=<challenge>, to have the target authenticate itself]
//	                                   <-   [CHAP_N=<user> CHAP_R=<response>]
//
// A response is the digest of identifier, secret and challenge, in this order.
package chap

import (
	"crypto/md5"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha3"
	"hash"
)

// Algorithm is the digest of a CHAP response. Its value is its number in CHAP_A (RFC 7143 12.1.3
// and the IANA registry "PPP Authentication Algorithms").
type Algorithm int

// The algorithms.
const (
	MD5      Algorithm = 5
	SHA1     Algorithm = 6
	SHA256   Algorithm = 7
	SHA3_256 Algorithm = 8
)

// hash is nil if the algorithm is not supported.
func (a Algorithm) hash() hash.Hash {
	switch a {
	case MD5:
		return md5.New()
	case SHA1:
		return sha1.New()
	case SHA256:
		return sha256.New()
	case SHA3_256:
		return sha3.New256()
	}
	return nil
}

// Response computes the response to a challenge (RFC 1994 4.1). The algorithm is supported.
func (a Algorithm) Response(identifier byte, secret, challenge []byte) []byte {
	h := a.hash()
	h.Write([]byte{identifier})
	h.Write(secret)
	h.Write(challenge)
	return h.Sum(nil)
}
