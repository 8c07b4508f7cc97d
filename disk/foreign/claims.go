package foreign

// claims are the places of equally long ranges of a file that must not overlap. A piece of the file
// as long as such a range has at most one beginning in it, so one number for each piece is enough.
type claims struct {
	length, unit int64
	begins       []uint16 // in each piece: 0 if nothing begins, otherwise the unit, from 1 on
}

// maxClaims bounds the memory of claims to 64 MiB.
const maxClaims = 32 << 20

func newClaims(f *file, size, length, unit int64) (*claims, error) {
	n := size/length + 1
	if n > maxClaims {
		return nil, f.unsupported(byQEMU, "of %d bytes in blocks of %d, which are too many to "+
			"check", size, length)
	}
	return &claims{length: length, unit: unit, begins: make([]uint16, n)}, nil
}

// add takes the range at off, which is a multiple of the unit and inside the file. It reports false
// if the range overlaps another one.
func (c *claims) add(off int64) bool {
	i, unit := off/c.length, off%c.length/c.unit+1
	free := c.begins[i] == 0 &&
		(i == 0 || int64(c.begins[i-1]) <= unit) &&
		(i+1 == int64(len(c.begins)) || c.begins[i+1] == 0 || int64(c.begins[i+1]) >= unit)
	if free {
		c.begins[i] = uint16(unit)
	}
	return free
}
