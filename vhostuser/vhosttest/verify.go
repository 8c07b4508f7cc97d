package vhosttest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"sync"
	"sync/atomic"
)

// Verifier is a guest that knows what it has written, and compares what it reads with that. Its
// data survives other verifiers, back ends that are killed, and migrations.
type Verifier struct {
	d       *Driver
	bytes   int
	seed    maphash.Seed
	workers []*verifying
	done    atomic.Uint64
}

// verifying is one thread of the guest. It has every n-th block for itself, so what a block must
// hold is known whenever no request of it is under way.
type verifying struct {
	v      *Verifier
	number int
	random *rand.Rand
	// what each block was given last; 0: zeroes; and what a failed write may have left there
	holds, orElse []uint64
	next          uint64
}

// VerifierOptions say what a verifier does.
type VerifierOptions struct {
	Blocks, Bytes int // of the disk, from its beginning, and of each, a multiple of 512
	Depth         int // requests at once, over all queues
	Seed          uint64
}

// NewVerifier makes a verifier for a disk whose blocks are zeroes.
func NewVerifier(d *Driver, o VerifierOptions) *Verifier {
	v := &Verifier{d: d, bytes: o.Bytes, seed: maphash.MakeSeed()}
	for i := range o.Depth {
		n := (o.Blocks - i + o.Depth - 1) / o.Depth
		v.workers = append(v.workers, &verifying{v: v, number: i,
			random: rand.New(rand.NewPCG(o.Seed, uint64(i))), holds: make([]uint64, n),
			orElse: make([]uint64, n)})
	}
	return v
}

// Done is how many requests have ended.
func (v *Verifier) Done() uint64 { return v.done.Load() }

// Run does so many requests, or until the context ends, which is no error. What the disk answers
// with an error is one, and so is wrong data. It may be called again.
func (v *Verifier) Run(ctx context.Context, requests int) error {
	errs := make([]error, len(v.workers))
	var group sync.WaitGroup
	for i, w := range v.workers {
		group.Go(func() {
			for n := i; n < requests && ctx.Err() == nil && errs[i] == nil; n += len(v.workers) {
				errs[i] = w.step()
				v.done.Add(1)
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// Check reads every block.
func (v *Verifier) Check() error {
	for _, w := range v.workers {
		for block := range w.holds {
			if err := w.read(block); err != nil {
				return err
			}
		}
	}
	return nil
}

// step does one request.
func (w *verifying) step() error {
	block := w.random.IntN(len(w.holds))
	switch n := w.random.IntN(16); {
	case n < 7:
		return w.read(block)
	case n < 13:
		w.next++
		return w.change(block, w.next, func(offset int64) error {
			return w.v.d.Write(w.queue(), offset, w.content(block, w.next))
		})
	case n < 14 && w.v.d.Features&FeatureWriteZeroes != 0:
		return w.change(block, 0, func(offset int64) error {
			return w.v.d.WriteZeroes(w.queue(), Range{Sector: uint64(offset) / sectorSize,
				Count: uint32(w.v.bytes / sectorSize), Unmap: n%2 == 0})
		})
	}
	return w.v.d.Flush(w.queue())
}

func (w *verifying) queue() int { return w.random.IntN(w.v.d.Queues()) }

// offset is where a block of this thread is on the disk.
func (w *verifying) offset(block int) int64 {
	return (int64(block)*int64(len(w.v.workers)) + int64(w.number)) * int64(w.v.bytes)
}

// change writes a block. If that fails, nobody knows which of both it holds.
func (w *verifying) change(block int, to uint64, write func(offset int64) error) error {
	err := write(w.offset(block))
	if err != nil {
		w.orElse[block] = to
		return fmt.Errorf("block at %d: %w", w.offset(block), err)
	}
	w.holds[block], w.orElse[block] = to, to
	return nil
}

// read compares a block with what it holds.
func (w *verifying) read(block int) error {
	got := make([]byte, w.v.bytes)
	if err := w.v.d.Read(w.queue(), w.offset(block), got); err != nil {
		return fmt.Errorf("block at %d: %w", w.offset(block), err)
	}
	for _, n := range []uint64{w.holds[block], w.orElse[block]} {
		if string(got) == string(w.content(block, n)) {
			w.holds[block], w.orElse[block] = n, n
			return nil
		}
	}
	return fmt.Errorf("block at %d has wrong data: it begins with write %d of thread %d, and the "+
		"last one was %d of %d", w.offset(block), binary.LittleEndian.Uint64(got[8:]),
		binary.LittleEndian.Uint64(got), w.holds[block], w.number)
}

// content is what the n-th write of this thread puts into a block: no other write has any 8 bytes
// of it at that place.
func (w *verifying) content(block int, n uint64) []byte {
	b := make([]byte, w.v.bytes)
	if n == 0 {
		return b
	}
	binary.LittleEndian.PutUint64(b, uint64(w.number))
	binary.LittleEndian.PutUint64(b[8:], n)
	binary.LittleEndian.PutUint64(b[16:], uint64(w.offset(block)))
	x := maphash.Bytes(w.v.seed, b[:24]) | 1
	for at := 24; at < len(b); at += 8 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		binary.LittleEndian.PutUint64(b[at:], x)
	}
	return b
}
