package api

import (
	"encoding/json"
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"
)

// Size is a number of bytes. In a request it is a number, or a quantity of Kubernetes such as 20Gi
// or 500M. In an answer it is a number.
type Size int64

// SectorSize is the unit of a disk's size, bytes.
const SectorSize = 512

// sizeUnits are the suffixes of quantities, the long ones first.
var sizeUnits = []struct {
	suffix string
	bytes  uint64
}{
	{"Ki", 1 << 10}, {"Mi", 1 << 20}, {"Gi", 1 << 30}, {"Ti", 1 << 40}, {"Pi", 1 << 50},
	{"k", 1e3}, {"M", 1e6}, {"G", 1e9}, {"T", 1e12}, {"P", 1e15},
}

// ParseSize reads a number of bytes or a quantity such as 20Gi.
func ParseSize(text string) (Size, error) {
	number, unit := text, uint64(1)
	for _, u := range sizeUnits {
		if rest, ok := strings.CutSuffix(text, u.suffix); ok {
			number, unit = rest, u.bytes
			break
		}
	}
	n, err := strconv.ParseUint(number, 10, 63)
	if err != nil {
		return 0, fmt.Errorf("%q is not a size: write bytes, or a number with Ki, Mi, Gi or Ti, "+
			"such as 20Gi", text)
	}
	high, low := bits.Mul64(n, unit)
	if high != 0 || low > math.MaxInt64 {
		return 0, fmt.Errorf("the size %q is too large", text)
	}
	return Size(low), nil
}

// UnmarshalJSON reads a number or a quantity.
func (s *Size) UnmarshalJSON(text []byte) error {
	word := string(text)
	if strings.HasPrefix(word, `"`) {
		if err := json.Unmarshal(text, &word); err != nil {
			return err
		}
	}
	n, err := ParseSize(word)
	if err != nil {
		return err
	}
	*s = n
	return nil
}

// MaxSize is the size of the largest disk, bytes.
const MaxSize = 64 << 40

// check refuses a size that no disk can have.
func (s Size) check() error {
	switch {
	case s > MaxSize:
		return fmt.Errorf("size: %d bytes is more than the %d (64Ti) that a disk can have", s,
			int64(MaxSize))
	case s < 0 || s%SectorSize != 0:
		return fmt.Errorf("size: %d bytes is not a multiple of %d: use a multiple, such as %d",
			s, SectorSize, (max(s, 0)/SectorSize+1)*SectorSize)
	}
	return nil
}
