package store

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
)

const (
	numbersName = "numbers.json"

	// firstLUN is the first number for a volume. Lower numbers are for images, which are numbered
	// by position and may become more.
	firstLUN = 64
	// lastSmall is the last number that every initiator writes the same way: the peripheral
	// addressing method (SAM-5 4.7.7.2). They are given first.
	lastSmall = 255
	// lastLUN is the highest number that a disk can have.
	lastLUN = 1<<14 - 1

	// ahead is how many numbers are saved as used in one step. A restart skips those that were not
	// used.
	ahead = 16
)

// numbers is the content of the file: the numbers that may be in use.
type numbers struct {
	// ID tells this store from others that keep volumes in the same directory.
	ID    string `json:"id"`
	Small turn   `json:"small"`
	Large turn   `json:"large"`
}

// turn goes round a range of numbers.
type turn struct {
	Saved uint16 `json:"next"` // the numbers before it may have been given

	next uint16 // to try
	left int    // how many numbers from next to Saved
}

func (s *Store) loadNumbers() error {
	text, err := s.read(numbersName)
	switch {
	case errors.Is(err, fs.ErrNotExist):
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
	case err == nil:
		err = json.Unmarshal(text, &s.numbers)
		s.numbers.Small.next, s.numbers.Large.next = s.numbers.Small.Saved, s.numbers.Large.Saved
	}
	if err == nil && s.numbers.ID == "" {
		err = errors.New("it has no identifier")
	}
	if err != nil {
		return fmt.Errorf("%s: %w; restore it from a backup", numbersName, err)
	}
	return nil
}

// ID returns the store's own name, which tells it from others.
func (s *Store) ID() string { return s.numbers.ID }

// NextLUN returns a free number. It returns a number again only after all others. The error is
// about storage, or says that no number is free.
func (s *Store) NextLUN(taken func(lun uint16) bool) (uint16, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range []struct {
		turn        *turn
		first, last uint16
	}{{&s.numbers.Small, firstLUN, lastSmall}, {&s.numbers.Large, lastSmall + 1, lastLUN}} {
		lun, steps := r.turn.find(r.first, r.last, taken)
		if lun == 0 {
			continue
		}
		if err := s.give(r.turn, steps, r.first, r.last); err != nil {
			return 0, err
		}
		return lun, nil
	}
	return 0, fmt.Errorf("every LUN from %d to %d is taken", firstLUN, lastLUN)
}

// find looks for the next free number, and counts the steps to it. 0: there is none.
func (t *turn) find(first, last uint16, taken func(lun uint16) bool) (lun uint16, steps int) {
	for i := range int(last-first) + 1 {
		if lun := t.after(i, first, last); !taken(lun) {
			return lun, i + 1
		}
	}
	return 0, 0
}

// after returns the number some steps later.
func (t *turn) after(steps int, first, last uint16) uint16 {
	at := max(int(t.next)-int(first), 0) + steps
	return first + uint16(at%(int(last-first)+1))
}

// give marks some numbers as used. It saves that before any of them is used.
func (s *Store) give(t *turn, steps int, first, last uint16) error {
	left := t.left - steps
	if left < 0 {
		before := t.Saved
		t.Saved, left = t.after(steps+ahead, first, last), ahead
		if err := s.replace(numbersName, s.numbers); err != nil {
			t.Saved = before
			return err
		}
	}
	t.next, t.left = t.after(steps, first, last), left
	return nil
}
