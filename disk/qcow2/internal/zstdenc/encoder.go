package zstdenc

import (
	"encoding/binary"

	"github.com/klauspost/compress/huff0"
)

// MaxSize is how much data Encode takes. Bytes.
const MaxSize = 64 << 10

// Encoder is the memory of a compressor, half a MiB. The zero value is ready to use.
type Encoder struct {
	src       source
	finder    finder
	literals  literals
	huffman   huff0.Scratch
	sequences sequences
}

// source is the input, with room behind it for bytes that are read but not used.
type source [MaxSize + stride]byte

// literals are the bytes that are in no match.
type literals struct {
	memory [MaxSize + stride]byte
	n      int
}

// stride is how many bytes are copied at once. Most runs of literals are shorter.
const stride = 16

// add appends the bytes of s between two positions.
//
//go:norace
func (l *literals) add(s *source, from, to int) {
	n := l.n
	l.n += to - from
	if to-from > stride {
		copy(l.memory[n:], s[from:to])
		return
	}
	copy(l.memory[n:n+stride], s[from:from+stride])
}

// Frame and block headers (RFC 8878, sections 3.1.1.1 and 3.1.1.2).
const (
	frameMagic    = 0xfd2fb528
	singleSegment = 1 << 5 // the window is the content, whose size comes in 1 byte
	contentSize16 = 1 << 6 // or in 2 bytes, less 256

	lastBlock       = 1
	blockRaw        = 0
	blockCompressed = 2
)

// Encode appends the frame of src, which has from 1 to MaxSize bytes, to dst. It may be larger than
// src, by 10 bytes at most.
func (e *Encoder) Encode(dst, src []byte) []byte {
	n := copy(e.src[:MaxSize], src)
	e.literals.n, e.sequences.n = 0, 0
	e.finder.find(&e.src, n, &e.sequences, &e.literals)

	dst = binary.LittleEndian.AppendUint32(dst, frameMagic)
	if n < 256 {
		dst = append(dst, singleSegment, byte(n))
	} else {
		dst = append(dst, singleSegment|contentSize16)
		dst = binary.LittleEndian.AppendUint16(dst, uint16(n-256))
	}
	begin := len(dst)
	dst = append(dst, 0, 0, 0) // the block's header, which is known last
	dst = e.appendLiterals(dst)
	dst = e.sequences.appendTo(dst)
	kind, size := blockCompressed, len(dst)-begin-3
	if size >= n {
		dst = append(dst[:begin+3], src...)
		kind, size = blockRaw, n
	}
	header := lastBlock | kind<<1 | size<<3
	dst[begin], dst[begin+1], dst[begin+2] = byte(header), byte(header>>8), byte(header>>16)
	return dst
}

// Kinds of literals (RFC 8878, section 3.1.1.3.1.1).
const (
	literalsRaw        = 0
	literalsCompressed = 2

	// fourStreams is how many literals are four Huffman streams, and no longer one.
	fourStreams = 1 << 10
	// minHuffman is for how few literals a Huffman tree may pay.
	minHuffman = 32
)

// appendLiterals appends the literals section.
func (e *Encoder) appendLiterals(dst []byte) []byte {
	all := e.literals.memory[:e.literals.n]
	if len(all) >= minHuffman {
		encode := huff0.Compress4X
		if len(all) < fourStreams {
			encode = huff0.Compress1X
		}
		e.huffman.Reuse = huff0.ReusePolicyNone
		packed, _, err := encode(all, &e.huffman)
		if err == nil && len(packed) < len(all) { // an error: they do not compress
			return append(appendSizes(dst, len(all), len(packed)), packed...)
		}
	}
	return append(appendSize(dst, len(all)), all...)
}

// appendSize appends the header of n literals that are not compressed.
func appendSize(dst []byte, n int) []byte {
	switch {
	case n < 1<<5:
		return append(dst, byte(literalsRaw|n<<3))
	case n < 1<<12:
		return append(dst, byte(literalsRaw|1<<2|n<<4), byte(n>>4))
	}
	return append(dst, byte(literalsRaw|3<<2|n<<4), byte(n>>4), byte(n>>12))
}

// appendSizes appends the header of n literals that are compressed to that many bytes.
func appendSizes(dst []byte, n, packed int) []byte {
	format, bits, length := 3, 18, 5
	switch {
	case n < fourStreams:
		format, bits, length = 0, 10, 3
	case n < 1<<14:
		format, bits, length = 2, 14, 4
	}
	header := uint64(literalsCompressed|format<<2) | uint64(n)<<4 | uint64(packed)<<(4+bits)
	for i := range length {
		dst = append(dst, byte(header>>(8*i)))
	}
	return dst
}
