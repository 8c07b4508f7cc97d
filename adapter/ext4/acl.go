package ext4

import (
	"encoding/binary"
	"errors"
)

// The kinds of entries of a POSIX ACL (include/uapi/linux/posix_acl.h), in the order in which they
// are sorted.
const (
	aclUserObj  = 0x01
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclGroup    = 0x08
	aclMask     = 0x10
	aclOther    = 0x20
)

var errACL = errors.New("is not a valid ACL")

// encodeACL turns an ACL in the form of getxattr(2) into ext4's form, where only entries for named
// users and groups have an id. The returned mode is the mode of a file with this ACL. minimal says
// that the mode alone expresses the ACL.
func encodeACL(value string, mode uint16) (acl string, _ uint16, minimal bool, err error) {
	le := binary.LittleEndian
	p := []byte(value)
	if len(p) < 4 || len(p)%8 != 4 || le.Uint32(p) != 2 {
		return "", 0, false, errACL
	}
	out := le.AppendUint32(nil, 1)
	perms := make(map[uint16]uint16) // by tag
	last := uint16(0)
	for p = p[4:]; len(p) > 0; p = p[8:] {
		tag, perm := le.Uint16(p), le.Uint16(p[2:])
		named := tag == aclUser || tag == aclGroup
		if perm > 7 || tag < last || tag == last && !named {
			return "", 0, false, errACL
		}
		switch tag {
		case aclUserObj, aclUser, aclGroupObj, aclGroup, aclMask, aclOther:
		default:
			return "", 0, false, errACL
		}
		out = le.AppendUint16(le.AppendUint16(out, tag), perm)
		if named {
			out = append(out, p[4:8]...)
		}
		perms[tag] = perm
		last = tag
	}
	for _, tag := range [...]uint16{aclUserObj, aclGroupObj, aclOther} {
		if _, there := perms[tag]; !there {
			return "", 0, false, errACL
		}
	}
	group, masked := perms[aclMask]
	if !masked {
		if len(perms) > 3 { // named users and groups need a mask
			return "", 0, false, errACL
		}
		group = perms[aclGroupObj]
	}
	mode = mode&^0o777 | perms[aclUserObj]<<6 | group<<3 | perms[aclOther]
	return string(out), mode, !masked, nil
}
