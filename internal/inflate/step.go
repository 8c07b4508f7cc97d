package inflate

// step decodes one literal or match and checks every bound. It reports whether the block ended. dst
// must not be full.
func (d *Decoder) step(dst, src []byte) (ended bool, err error) {
	d.need(src, 48) // for the longest match; fewer may be available
	e := d.tables.litlen[d.bits&(1<<litLenBits-1)]
	if e&isLink != 0 && e&isLiteral == 0 {
		e = d.follow(d.tables.litlen[:], e, litLenBits)
	}
	n := uint(e & takeMask)
	switch {
	case e&isLiteral != 0:
		if n > d.left {
			return false, errTruncated
		}
		d.take(n)
		dst[d.out] = byte(e >> valueAt)
		d.out++
		return false, nil
	case e&isSpecial != 0 && e&isEnd == 0:
		return false, errCode
	}
	if n > d.left {
		return false, errTruncated
	}
	length := d.value(e)
	if e&isSpecial != 0 {
		return true, nil
	}
	e = d.tables.dist[d.bits&(1<<distBits-1)]
	if e&isLink != 0 {
		e = d.follow(d.tables.dist[:], e, distBits)
	}
	switch {
	case e&isSpecial != 0:
		return false, errCode
	case uint(e&takeMask) > d.left:
		return false, errTruncated
	}
	distance := d.value(e)
	if distance > d.out {
		return false, errDistance
	}
	to := dst[d.out:min(d.out+length, len(dst))]
	d.out += len(to)
	for len(to) > 0 { // copied bytes can be copied again, so each round doubles
		n := copy(to, dst[d.out-len(to)-distance:d.out-len(to)])
		to, distance = to[n:], distance+n
	}
	return false, nil
}

// follow returns the entry that a link leads to, as if there were no subtables.
func (d *Decoder) follow(t []uint32, link uint32, width uint) uint32 {
	index := d.bits >> width & (1<<(link>>codeAt&codeMask) - 1)
	return t[(uint64(link>>valueAt&valueMask)+index)&uint64(len(t)-1)] + uint32(width)*oneBit
}

// value removes the bits of a length or a distance and returns it.
func (d *Decoder) value(e uint32) int {
	extra := d.take(uint(e&takeMask)) >> (e >> codeAt & codeMask)
	return int(e>>valueAt&valueMask) + int(extra)
}
