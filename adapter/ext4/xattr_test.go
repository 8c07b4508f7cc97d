package ext4

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// acl makes an ACL as getxattr(2) returns it, of tag, permissions and id.
func acl(entries ...[3]uint32) string {
	le := binary.LittleEndian
	p := le.AppendUint32(nil, 2)
	for _, e := range entries {
		p = le.AppendUint16(le.AppendUint16(p, uint16(e[0])), uint16(e[1]))
		p = le.AppendUint32(p, e[2])
	}
	return string(p)
}

const noID = 0xffffffff

func TestExtendedAttributes(t *testing.T) {
	d, w := newDisk(t), New()
	file := func(name string, x map[string]string) {
		t.Helper()
		must(w.Create(Root, name, Attr{Mode: 0o644, Xattrs: x}, strings.NewReader("")))
	}
	large := strings.Repeat("v", 1000)
	d.level(w, func() {
		file("inside", map[string]string{"user.a": "b", "security.capability": "12345678"})
		file("empty", map[string]string{"user.empty": ""})
		file("outside", map[string]string{"user.large": large, "trusted.x": "y",
			"user." + strings.Repeat("n", 250): "long"})
		file("full", map[string]string{"user.v": strings.Repeat("f", 4096-32-4-16-4)})
		file("acl", map[string]string{"system.posix_acl_access": acl([3]uint32{1, 6, noID},
			[3]uint32{2, 7, 1000}, [3]uint32{4, 4, noID}, [3]uint32{16, 7, noID},
			[3]uint32{32, 0, noID})})
		must(w.Mkdir(Root, "dir", Attr{Mode: 0o755, Xattrs: map[string]string{
			"system.posix_acl_default": acl([3]uint32{1, 7, noID}, [3]uint32{4, 5, noID},
				[3]uint32{32, 5, noID})}}))
		for i := range 2500 { // more than may share a block
			file(fmt.Sprint("same", i), map[string]string{"user.same": large})
		}
	})
	require.Contains(t, d.debugfs("ea_list /inside"), "security.capability")
	require.Equal(t, large+"\n", d.debugfs("ea_get -V /outside user.large"))
	require.Contains(t, d.debugfs("ea_list /outside"), "trusted.x")
	require.Contains(t, d.debugfs("stat /acl"), "Mode:  0670")
	d.level(w, func() {
		for i := range 1500 {
			require.NoError(t, w.Remove(Root, fmt.Sprint("same", i)))
		}
		e, _ := w.Lookup(Root, "outside")
		require.NoError(t, w.SetAttr(e.Inode, Attr{Mode: 0o600}))
	})
	require.NotContains(t, d.debugfs("ea_list /outside"), "trusted.x")
}

func TestExtendedAttributesThatAreRefused(t *testing.T) {
	w := New()
	w.Begin(nil)
	for name, c := range map[string]struct{ value, message string }{
		"user." + strings.Repeat("n", 251): {"", "has a name of 256 bytes"},
		"user.":                            {"", "cannot be stored: only user"},
		"nonsense":                         {"", "cannot be stored: only user"},
		"system.sockprotoname":             {"", "cannot be stored: only user"},
		"user.v":                           {strings.Repeat("f", 4096), "take more than the"},
		"system.posix_acl_access":          {"nonsense", "is not a valid ACL"},
		"system.posix_acl_default":         {"nonsense", "only a directory has"},
	} {
		_, err := w.Create(Root, "x", Attr{Xattrs: map[string]string{name: c.value}},
			strings.NewReader(""))
		require.ErrorContains(t, err, c.message, name)
	}
	_, there := w.Lookup(Root, "x")
	require.False(t, there)
}
