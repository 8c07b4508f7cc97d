package overlay

import (
	"errors"
	"fmt"
	"math/bits"
	"sync/atomic"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/internal/osfile"
)

// mapStore keeps the map of a disk in files. The live file is written with every change and never
// synced: what it says is true as long as the kernel runs, so that a process that is killed loses
// nothing that it acknowledged. The durable file, which only a disk that must survive a crash of
// the machine has, is written by a checkpoint, after the data that it speaks of has reached
// storage.
type mapStore struct {
	live    storage // nil: the map dies with the process
	durable storage // nil: the disk dies with the machine
	// save is what blockMap.set is to call, made once.
	save func(page, word int64, words []byte) error
	// dirty is the pages that the durable file does not have as they are, or perhaps only as the
	// page cache has it, a bit for each.
	dirty []atomic.Uint64
}

// newMapStore makes the store of a map of that many pages, without files.
func newMapStore(pages int) *mapStore {
	s := &mapStore{dirty: make([]atomic.Uint64, (pages+63)/64)}
	s.save = s.savePage
	return s
}

func (s *mapStore) savePage(page, word int64, words []byte) error {
	if s.live != nil {
		if _, err := s.live.WriteAt(words, mapHeaderSize+page*mapPageSize+word*8); err != nil {
			return mapError(err)
		}
	}
	s.taint(page)
	return nil
}

// taint makes the next checkpoint save a page: the durable file may know less.
func (s *mapStore) taint(page int64) { s.dirty[page/64].Or(1 << (page % 64)) }

// untaint is for a durable file that was made of the map as it is. Nobody marks blocks meanwhile.
func (s *mapStore) untaint() {
	for i := range s.dirty {
		s.dirty[i].Store(0)
	}
}

// distrust makes the next start go by the durable file alone: a flush has failed, so that what the
// live file speaks of may be neither on storage nor, some time later, in the page cache.
func (s *mapStore) distrust() error {
	if s.live == nil {
		return nil
	}
	if _, err := s.live.WriteAt(make([]byte, mapHeaderSize), 0); err != nil {
		return mapError(err)
	}
	return nil
}

// mapError is an error of writing a map file, for the guest.
func mapError(err error) error {
	if osfile.IsFull(err) {
		return fmt.Errorf("%w: %w", disk.ErrNoSpace, err)
	}
	return fmt.Errorf("writing the map of the disk: %w", err)
}

// takeDirty calls f for the dirty pages, which are then no longer dirty, at most count at a time.
func (s *mapStore) takeDirty(count int, f func(pages []int64) error) error {
	pages := make([]int64, 0, count)
	for i := range s.dirty {
		for word := s.dirty[i].Swap(0); word != 0; word &= word - 1 {
			pages = append(pages, int64(i*64+bits.TrailingZeros64(word)))
		}
		if len(pages)+64 <= count && i < len(s.dirty)-1 || len(pages) == 0 {
			continue
		}
		if err := f(pages); err != nil {
			for _, page := range pages {
				s.taint(page)
			}
			return err
		}
		pages = pages[:0]
	}
	return nil
}

func (s *mapStore) close() error {
	var errs []error
	for _, f := range []storage{s.live, s.durable} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}
