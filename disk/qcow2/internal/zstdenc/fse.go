package zstdenc

import "math/bits"

const (
	maxSymbols = 53 // codes of match lengths; the others are fewer
	minLog     = 5  // of how many states there are (RFC 8878, section 4.1.1)
	maxLog     = 9  // section 3.1.1.3.2.1

	// How symbols are encoded (section 3.1.1.3.2.1).
	modePredefined = 0
	modeRepeated   = 1 // all are the same
	modeOwn        = 2
)

// coder is a finite state machine that encodes symbols (RFC 8878, section 4.1). Its states are
// numbered from 1<<log on.
type coder struct {
	log     uint8
	states  [1 << maxLog]uint16
	symbols [maxSymbols]transition
}

// transition is how a symbol changes the state.
type transition struct {
	bits  uint32 // plus the state, in the upper 16 bits: how many bits of the state are written
	state int32  // plus the rest of the state: where in states the next one is
}

// begin is a state in which the symbol is read that is the last one, as they are written from
// there.
func (c *coder) begin(symbol uint8) uint32 {
	t := &c.symbols[symbol]
	n := (t.bits + 1<<15) >> 16
	return uint32(c.states[(int32((n<<16-t.bits)>>n)+t.state)&(1<<maxLog-1)])
}

// write writes the bits that lead from the state of a symbol to the state of the ones behind it.
func (c *coder) write(w *bitWriter, state uint32, symbol uint8) uint32 {
	t := &c.symbols[symbol]
	n := (t.bits + state) >> 16
	w.add(uint64(state), uint(n))
	return uint32(c.states[(int32(state>>n)+t.state)&(1<<maxLog-1)])
}

// build makes the machine of a distribution: how many of the 1<<log states each symbol has; -1:
// one, of those at the end.
func (c *coder) build(log uint8, shares []int16) {
	c.log = log
	size := 1 << log
	var symbols [1 << maxLog]uint8 // which the states are of
	var next [maxSymbols]int       // where in states the next one of a symbol comes
	end, total := size, 0
	for s, share := range shares {
		next[s] = total
		if share == -1 {
			end--
			symbols[end] = uint8(s)
			total++
		}
		total += max(0, int(share))
	}
	at, step := 0, size>>1+size>>3+3
	for s, share := range shares {
		for range share {
			symbols[at] = uint8(s)
			for at = (at + step) & (size - 1); at >= end; at = (at + step) & (size - 1) {
			}
		}
	}
	for i, s := range symbols[:size] {
		c.states[next[s]] = uint16(size + i)
		next[s]++
	}
	total = 0
	for s, share := range shares {
		switch share {
		case 0:
		case -1, 1:
			c.symbols[s] = transition{uint32(log)<<16 - uint32(size), int32(total - 1)}
			total++
		default:
			n := uint32(log) - uint32(bits.Len16(uint16(share-1))-1)
			c.symbols[s] = transition{n<<16 - uint32(share)<<n, int32(total - int(share))}
			total += int(share)
		}
	}
}

// predefined is a distribution that the format has, and how many symbols may be better off with
// one of their own.
type predefined struct {
	coder coder
	least int
}

func newPredefined(log uint8, least int, shares ...int16) *predefined {
	p := &predefined{least: least}
	p.coder.build(log, shares)
	return p
}

// The distributions are in section 3.1.1.3.2.2 of RFC 8878. How many symbols there have to be is as
// in libzstd.
var (
	defaultLiterals = newPredefined(6, 64, 4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2,
		2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1)
	defaultMatches = newPredefined(6, 64, 1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
		1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1,
		-1, -1, -1, -1, -1)
	defaultOffsets = newPredefined(5, 32, 1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
		1, 1, 1, 1, 1, -1, -1, -1, -1, -1)
)

// table is how the symbols of one kind in a block are encoded.
type table struct {
	*coder
	counts [maxSymbols]uint32
	own    coder
	shares [maxSymbols]int16
}

func (t *table) reset() { clear(t.counts[:]) }

// choose decides how the n symbols are encoded that were counted, in how many states at most, and
// appends what a reader has to know of it.
func (t *table) choose(p *predefined, most uint8, n int, dst []byte) (mode byte, out []byte) {
	largest, last := uint32(0), 0
	for s, count := range t.counts {
		if count > 0 {
			last = s
		}
		largest = max(largest, count)
	}
	switch {
	case n < p.least || int(largest) < n>>(p.coder.log-1):
		t.coder = &p.coder
		return modePredefined, dst
	case int(largest) == n:
		t.coder = &t.own
		t.own = coder{} // one state, and nothing to write
		return modeRepeated, append(dst, uint8(last))
	}
	log := min(most, uint8(bits.Len(uint(n-1))-3))
	log = max(log, minLog, uint8(min(bits.Len(uint(n)), bits.Len(uint(last))+1)))
	t.coder = &t.own
	t.normalise(log, n, last)
	t.own.build(log, t.shares[:last+1])
	return modeOwn, appendShares(dst, log, t.shares[:last+1])
}

// rounding is which fraction of 1<<20 rounds a small share up, as in libzstd.
var rounding = [8]uint64{0, 473195, 504333, 520860, 550000, 700000, 750000, 830000}

// normalise gives each symbol up to last its share of the states: at least one, if it is there.
func (t *table) normalise(log uint8, n, last int) {
	const fraction = 62
	step := uint64(1) << fraction / uint64(n)
	rest, largest := 1<<log, 0
	for s := range t.shares[:last+1] {
		count := t.counts[s]
		switch {
		case count == 0:
			t.shares[s] = 0
			continue
		case count <= uint32(n)>>log:
			t.shares[s] = -1
			rest--
			continue
		}
		exact := uint64(count) * step // in parts of a state, of which it has 1<<(fraction-log)
		share := exact >> (fraction - log)
		if share < 8 && exact-share<<(fraction-log) > rounding[share]<<(fraction-log-20) {
			share++
		}
		t.shares[s] = int16(share)
		rest -= int(share)
		if t.shares[s] > t.shares[largest] {
			largest = s
		}
	}
	if int(t.shares[largest])+rest > int(t.shares[largest])/2 {
		t.shares[largest] += int16(rest)
		return
	}
	for ; rest < 0; rest++ { // rarely: many were rounded up, and no share is large
		largest = 0
		for s, share := range t.shares[:last+1] {
			if share > t.shares[largest] {
				largest = s
			}
		}
		t.shares[largest]--
	}
}

// appendShares appends the description of a distribution (RFC 8878, section 4.1.1).
func appendShares(dst []byte, log uint8, shares []int16) []byte {
	w := bitWriter{out: dst}
	w.add(uint64(log-minLog), 4)
	rest := 1<<log + 1
	threshold, width := 1<<log, uint(log)+1
	for s := 0; rest > 1; {
		share := int(shares[s])
		s++
		most := 2*threshold - 1 - rest
		rest -= max(share, -share)
		v, n := share+1, width
		if v >= threshold {
			v += most
		}
		if v < most {
			n--
		}
		w.add(uint64(v), n)
		for rest < threshold {
			width--
			threshold >>= 1
		}
		if share == 0 { // how many more of them come
			zeros := 0
			for shares[s] == 0 {
				zeros++
				s++
			}
			for ; zeros >= 3; zeros -= 3 {
				w.add(3, 2)
				w.flush()
			}
			w.add(uint64(zeros), 2)
		}
		w.flush()
	}
	return w.bytes()
}
