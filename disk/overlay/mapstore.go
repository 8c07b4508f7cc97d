package overlay

import (
	"errors"
	"fmt"
	"math/bits"
	"sync/atomic"

	"kubevirt.io/disk/disk"
)

// mapStore keeps the map of a disk in its files, see mapMagic. Without the live file, the kill of a
// process would lose acknowledged writes. Only a disk that must survive a crash of the machine has
// the durable file.
//
// Marks and flushes agree by dirty. savePage writes to the live file first, and then sets the
// page's bit, with the page's lock held until the blocks are marked. A checkpoint first clears the
// bit, then copies the page with its lock held, then flushes the data, and writes the copy. So a
// block that is marked after the copy makes its page dirty again, for the next checkpoint, and no
// block gets into the durable file before its data.
type mapStore struct {
	live    storage // nil: the map dies with the process
	durable storage // nil: the disk dies with the machine
	// save is the argument for blockMap.set, made once.
	save func(page, word int64, words []byte) error
	// dirty has a bit for each page whose current content the durable file may lack, or have only
	// in the page cache.
	dirty []atomic.Uint64
}

// newMapStore makes the store for a map of that many pages, without files.
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

// taint makes the next checkpoint save a page, because the durable file may lack bits of it.
func (s *mapStore) taint(page int64) { s.dirty[page/64].Or(1 << (page % 64)) }

// untaint clears all bits after the durable file was made from the current map. Nobody may mark
// blocks meanwhile.
func (s *mapStore) untaint() {
	for i := range s.dirty {
		s.dirty[i].Store(0)
	}
}

// distrust makes the next start use only the durable file. A flush has failed, so data that the
// live file says is there may be neither on storage nor, later, in the page cache.
func (s *mapStore) distrust() error {
	if s.live == nil {
		return nil
	}
	if _, err := s.live.WriteAt(make([]byte, mapHeaderSize), 0); err != nil {
		return mapError(err)
	}
	return nil
}

// mapError explains an error of writing a map file to the guest.
func mapError(err error) error {
	if disk.IsNoSpace(err) {
		return fmt.Errorf("%w: %w", disk.ErrNoSpace, err)
	}
	return fmt.Errorf("writing the map of the disk: %w", err)
}

// takeDirty calls f with the dirty pages, at most count at a time, and makes them clean.
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
