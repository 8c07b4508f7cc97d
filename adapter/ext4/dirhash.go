package ext4

import "math/bits"

// hashSeed is s_hash_seed. It is constant, because the order of an index depends on it.
var hashSeed = [4]uint32{0x7669f0a1, 0x3c5e92d4, 0xb81d6e27, 0x0f4ac35b}

// nameHash is the hash with which an index finds a name: half MD4 of unsigned bytes. Its lowest bit
// is 0.
func nameHash(name []byte) uint32 {
	sum := hashSeed
	for {
		in := hashWords(name)
		halfMD4(&sum, &in)
		if len(name) <= 32 {
			break
		}
		name = name[32:]
	}
	hash := sum[1] &^ 1
	if hash == 0xfffffffe { // reserved for the end of a directory
		hash = 0xfffffffc
	}
	return hash
}

// hashWords turns at most 32 bytes of a name into words. The rest is padded with the length.
func hashWords(name []byte) (in [8]uint32) {
	pad := uint32(len(name)) | uint32(len(name))<<8
	pad |= pad << 16
	for i := range in {
		in[i] = pad
	}
	for i, c := range name[:min(len(name), 32)] {
		if i%4 == 0 {
			in[i/4] = pad
		}
		in[i/4] = in[i/4]<<8 + uint32(c)
	}
	return in
}

// halfMD4 is the kernel's lib/halfmd4: three rounds of eight steps.
func halfMD4(sum *[4]uint32, in *[8]uint32) {
	const k2, k3 = 0x5a827999, 0x6ed9eba1
	a, b, c, d := sum[0], sum[1], sum[2], sum[3]
	f := func(x, y, z uint32) uint32 { return z ^ x&(y^z) }
	g := func(x, y, z uint32) uint32 { return x&y + (x^y)&z }
	h := func(x, y, z uint32) uint32 { return x ^ y ^ z }
	for i := 0; i < 8; i += 4 {
		a = bits.RotateLeft32(a+f(b, c, d)+in[i], 3)
		d = bits.RotateLeft32(d+f(a, b, c)+in[i+1], 7)
		c = bits.RotateLeft32(c+f(d, a, b)+in[i+2], 11)
		b = bits.RotateLeft32(b+f(c, d, a)+in[i+3], 19)
	}
	for i := 1; i >= 0; i-- {
		a = bits.RotateLeft32(a+g(b, c, d)+in[i]+k2, 3)
		d = bits.RotateLeft32(d+g(a, b, c)+in[i+2]+k2, 5)
		c = bits.RotateLeft32(c+g(d, a, b)+in[i+4]+k2, 9)
		b = bits.RotateLeft32(b+g(c, d, a)+in[i+6]+k2, 13)
	}
	for i := 3; i >= 1; i -= 2 {
		a = bits.RotateLeft32(a+h(b, c, d)+in[i]+k3, 3)
		d = bits.RotateLeft32(d+h(a, b, c)+in[i+4]+k3, 9)
		c = bits.RotateLeft32(c+h(d, a, b)+in[i-1]+k3, 11)
		b = bits.RotateLeft32(b+h(c, d, a)+in[i+3]+k3, 15)
	}
	sum[0] += a
	sum[1] += b
	sum[2] += c
	sum[3] += d
}
