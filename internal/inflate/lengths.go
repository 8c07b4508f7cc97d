package inflate

// repeatCode gives the number of extra bits and the shortest repetition of the code length symbols
// 16 to 18.
var repeatCode = [3]struct{ extra, least uint }{{2, 3}, {3, 3}, {7, 11}}

// codeOrder is the order in which the code length code's lengths are stored.
var codeOrder = [19]uint8{16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15}

// readTables makes the tables of a block with codes of its own (RFC 1951, section 3.2.7).
func (d *Decoder) readTables(src []byte) error {
	if !d.need(src, 14) {
		return errTruncated
	}
	litlen, dist, stored := int(d.take(5))+257, int(d.take(5))+1, int(d.take(4))+4
	if litlen > maxLitLen || dist > maxDist {
		return errLengths
	}
	var lengths [19]uint8
	for _, symbol := range codeOrder[:stored] {
		if !d.need(src, 3) {
			return errTruncated
		}
		lengths[symbol] = uint8(d.take(3))
	}
	if !d.build(d.codes[:], codeBits, lengths[:], codeEntries[:]) {
		return errTree
	}
	all := d.lengths[:litlen+dist]
	for i := 0; i < len(all); {
		d.need(src, codeBits+7)
		e := d.codes[d.bits&(1<<codeBits-1)]
		n := uint(e & takeMask)
		switch {
		case e&isSpecial != 0:
			return errCode
		case n > d.left:
			return errTruncated
		}
		d.take(n)
		symbol := e >> valueAt & valueMask
		if symbol < 16 {
			all[i] = uint8(symbol)
			i++
			continue
		}
		repeat := repeatCode[symbol-16]
		if repeat.extra > d.left {
			return errTruncated
		}
		times := int(repeat.least + d.take(repeat.extra))
		if times > len(all)-i || symbol == 16 && i == 0 {
			return errLengths
		}
		value := uint8(0)
		if symbol == 16 {
			value = all[i-1]
		}
		for range times {
			all[i] = value
			i++
		}
	}
	d.tables = &d.own
	if !d.build(d.own.litlen[:], litLenBits, all[:litlen], litLenEntries[:]) ||
		!d.build(d.own.dist[:], distBits, all[litlen:], distEntries[:]) {
		return errTree
	}
	return nil
}
