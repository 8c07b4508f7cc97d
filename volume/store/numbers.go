package store

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"

	"kubevirt.io/disk/internal/durable"
)

const (
	numbersName = "numbers.json"

	// firstLUN is the first number for a volume. Lower numbers are for images, which are numbered
	// by position and may become more.
	firstLUN = 64
	// lastSmall is the last number that every initiator writes in the same form: the peripheral
	// addressing method (SAM-5 4.7.7.2). These numbers are given first.
	lastSmall = 255
	// lastLUN is the highest number that a disk can have.
	lastLUN = 1<<14 - 1
)

// numbers is the content of the file: the numbers that may be in use.
type numbers struct {
	// ID tells this store from others that keep volumes in the same directory.
	ID    string `json:"id"`
	Small turn   `json:"small"`
	Large turn   `json:"large"`
}

// turn gives the numbers of a range in turn.
type turn struct {
	Next uint16 `json:"next"` // the numbers before it may have been given
}

func (s *Store) loadNumbers() error {
	err := durable.LoadRecord(s.Dir(numbersName), &s.numbers)
	if errors.Is(err, fs.ErrNotExist) {
		records, _, _, loadErr := s.Load()
		if loadErr != nil {
			return loadErr
		}
		if len(records) > 0 { // with a new identifier, their disks would not be found
			return fmt.Errorf("%s is missing, and there are volumes; restore it from a backup",
				numbersName)
		}
		s.numbers.ID = rand.Text()
		return s.replace(numbersName, s.numbers)
	}
	if err == nil && s.numbers.ID == "" {
		err = errors.New("it has no identifier")
	}
	if err != nil {
		return fmt.Errorf("%s: %w; %s", numbersName, err, remedy(err, "restore it from a backup"))
	}
	return nil
}

// ID returns the store's own name, which tells it from others.
func (s *Store) ID() string { return s.numbers.ID }

// NextLUN returns a free number, and saves that first. It returns a number again only after all
// others of its range, and a number of the second range only if none of the first is free. The
// error is about storage, or says that no number is free.
func (s *Store) NextLUN(taken func(lun uint16) bool) (uint16, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range []struct {
		turn        *turn
		first, last uint16
	}{{&s.numbers.Small, firstLUN, lastSmall}, {&s.numbers.Large, lastSmall + 1, lastLUN}} {
		before, count := r.turn.Next, r.last-r.first+1
		at := max(before, r.first) - r.first
		for i := range count {
			lun := r.first + (at+i)%count
			if taken(lun) {
				continue
			}
			r.turn.Next = lun + 1
			if err := s.replace(numbersName, s.numbers); err != nil {
				r.turn.Next = before
				return 0, err
			}
			return lun, nil
		}
	}
	return 0, fmt.Errorf("every LUN from %d to %d is taken", firstLUN, lastLUN)
}
