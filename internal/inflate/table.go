package inflate

import "sync"

const (
	litLenBits = 11 // of input that index the literal and length table
	distBits   = 9
	codeBits   = 7 // the longest code of a code length
	maxBits    = 15

	numLitLen = 288 // there are 288 fixed codes, two of them without a meaning
	maxLitLen = 286
	maxDist   = 30
	endBlock  = 256

	// A subtable of 2^s entries holds the codes that begin with one index of the first part. If
	// these codes are complete and have up to s bits, there are at least s+1 of them. So 286 codes
	// need less than 286/5*16 entries behind the 2048, and 30 codes less than 30/7*64 behind the
	// 512. Both fit, and masks keep any index inside.
	litLenSize = 4096
	distSize   = 1024
)

// tables are the codes of a block. Each table is indexed by the next bits of the input. If a code
// is longer, the entry links to a subtable, which is indexed by the bits that follow. An entry:
//
//	bits  0-5  how much input it takes, with a length's or distance's extra bits
//	bits  8-22 the literal; the smallest length or distance; or the start of a link's subtable
//	bits 24-27 how many bits the code has; or how many bits index a link's subtable
//	bits 28-31 the kind; a length or a distance has none
type tables struct {
	litlen [litLenSize]uint32
	dist   [distSize]uint32
}

const (
	isLiteral = 1 << 31
	// neither a literal nor a length or distance: one of the next two, or a code without a meaning
	isSpecial = 1 << 30
	isEnd     = 1 << 29 // the end of the block
	isLink    = 1 << 28 // to a subtable

	takeMask  = 63
	valueAt   = 8
	valueMask = 1<<15 - 1
	codeAt    = 24
	codeMask  = 15
	oneBit    = 1<<codeAt | 1 // an entry's code is one bit longer

	invalid = isSpecial
)

// The entries of all symbols, without their codes (RFC 1951, section 3.2.5).
var (
	litLenEntries = makeLitLenEntries()
	distEntries   = makeDistEntries()
	codeEntries   = makeCodeEntries()
)

func makeLitLenEntries() (e [numLitLen]uint32) {
	for i := range endBlock {
		e[i] = isLiteral | uint32(i)<<valueAt
	}
	e[endBlock] = isSpecial | isEnd
	length := uint32(3)
	for i := range 28 {
		extra := uint32(max(i/4-1, 0))
		e[endBlock+1+i] = length<<valueAt | extra
		length += 1 << extra
	}
	e[285] = 258 << valueAt
	e[286], e[287] = invalid, invalid
	return e
}

func makeDistEntries() (e [32]uint32) {
	distance := uint32(1)
	for i := range maxDist {
		extra := uint32(max(i/2-1, 0))
		e[i] = distance<<valueAt | extra
		distance += 1 << extra
	}
	e[30], e[31] = invalid, invalid
	return e
}

func makeCodeEntries() (e [19]uint32) {
	for i := range e {
		e[i] = uint32(i) << valueAt
	}
	return e
}

// fixedTables returns the tables of the fixed codes (RFC 1951, section 3.2.6).
var fixedTables = sync.OnceValue(func() *tables {
	var d Decoder
	lengths := make([]uint8, numLitLen)
	for i := range lengths {
		switch {
		case i < 144, i >= 280:
			lengths[i] = 8
		case i < 256:
			lengths[i] = 9
		default:
			lengths[i] = 7
		}
	}
	d.build(d.own.litlen[:], litLenBits, lengths, litLenEntries[:])
	for i := range 32 {
		lengths[i] = 5
	}
	d.build(d.own.dist[:], distBits, lengths[:32], distEntries[:])
	return &d.own
})
