package pdu

// SNLess says whether serial number a comes before b, modulo 2^32 (RFC 7143 4.2.2, RFC 1982). Two
// numbers that are exactly 2^31 apart have no order, so each comes before the other. Our windows
// are never that wide.
func SNLess(a, b uint32) bool { return int32(a-b) < 0 }
