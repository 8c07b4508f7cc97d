package ext4

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEmptyFileSystem(t *testing.T) {
	d, w := newDisk(t), New()
	d.level(w, func() {})
	require.Equal(t, int64(8<<30), w.Size())
	require.Less(t, len(d.written), 60, "an empty file system takes few blocks")
	features := d.debugfs("features")
	for _, f := range []string{"has_journal", "dir_index", "filetype", "extent", "64bit",
		"flex_bg", "sparse_super", "metadata_csum"} {
		require.Contains(t, features, f)
	}
	require.Contains(t, d.debugfs("stat <5>"), fmt.Sprintf("%d", BootOffset/BlockSize))
}

func TestNothingChangedIsNothingWritten(t *testing.T) {
	d, w := newDisk(t), New()
	d.level(w, func() { must(w.Create(Root, "a", Attr{Mode: 0o644}, text4k("a", 100))) })
	d.level(w, func() {})
	require.Empty(t, d.written)
}

func TestKindsOfFiles(t *testing.T) {
	d, w := newDisk(t), New()
	attr := Attr{Mode: 0o4755, UID: 70000, GID: 1 << 20, Seconds: 1<<33 + 5, Nanoseconds: 123456789}
	long := strings.Repeat("n", 255)
	d.level(w, func() {
		dir := must(w.Mkdir(Root, "dir", Attr{Mode: 0o1777}))
		must(w.Create(dir, "file", attr, strings.NewReader("content")))
		must(w.Create(dir, long, attr, strings.NewReader("")))
		must(w.Symlink(dir, "short", "file", attr))
		must(w.Symlink(dir, "l59", strings.Repeat("x", 59), attr))
		must(w.Symlink(dir, "l60", strings.Repeat("y", 60), attr))
		must(w.Symlink(dir, "l4095", strings.Repeat("z", 4095), attr))
		must(w.Mknod(dir, "null", TypeChar, 1, 3, attr))
		must(w.Mknod(dir, "large", TypeBlock, 4095, 1<<20-1, attr))
		must(w.Mknod(dir, "fifo", TypeFIFO, 0, 0, attr))
		must(w.Mknod(dir, "socket", TypeSocket, 0, 0, attr))
		file, _ := w.Lookup(dir, "file")
		require.NoError(t, w.Link(Root, "other", file.Inode))
	})
	require.Equal(t, "content", d.cat("/other"))
	stat := d.debugfs("stat /dir/file")
	for _, want := range []string{"Mode:  04755", "User: 70000", "Group: 1048576", "Links: 2",
		"Type: regular"} {
		require.Contains(t, stat, want)
	}
	require.Contains(t, d.debugfs("stat /dir/large"), "4095")
	require.Contains(t, d.debugfs("stat /dir/l60"), "Size: 60")
	require.Contains(t, d.debugfs("stat /dir/short"), `"file"`)
}

// TestRemovedFiles removes all kinds of files in a higher level.
func TestRemovedFiles(t *testing.T) {
	d, w := newDisk(t), New()
	var dir Inode
	d.level(w, func() {
		dir = must(w.Mkdir(Root, "dir", Attr{Mode: 0o755}))
		for i := range 3 {
			sub := must(w.Mkdir(dir, fmt.Sprint("sub", i), Attr{Mode: 0o755}))
			for j := range 100 {
				must(w.Create(sub, fmt.Sprint("file", j), Attr{Mode: 0o644}, text4k("x", 5000)))
			}
			must(w.Symlink(sub, "long", strings.Repeat("t", 300), Attr{Mode: 0o777}))
		}
		kept := must(w.Create(Root, "kept", Attr{Mode: 0o644}, strings.NewReader("kept")))
		require.NoError(t, w.Link(dir, "kept", kept))
	})
	d.level(w, func() {
		require.NoError(t, w.Remove(dir, "sub1"))
		require.NoError(t, w.Remove(dir, "kept"))
	})
	require.Equal(t, "kept", d.cat("/kept"))
	d.level(w, func() { require.NoError(t, w.Remove(Root, "dir")) })
	require.Equal(t, []string{"lost+found", "kept"}, w.Names(Root))
	d.level(w, func() {
		must(w.Create(Root, "dir", Attr{Mode: 0o600}, strings.NewReader("now a file")))
	})
	require.Equal(t, "now a file", d.cat("/dir"))
}

// TestLargeDirectories has indexes of one and of two levels, grows them and makes them small again.
func TestLargeDirectories(t *testing.T) {
	const files = 100000
	d, w := newDisk(t), New()
	var dir Inode
	name := func(i int) string { return fmt.Sprintf("%040d", i) }
	d.level(w, func() {
		dir = must(w.Mkdir(Root, "dir", Attr{Mode: 0o755}))
		for i := range 300 {
			must(w.Create(dir, name(i), Attr{Mode: 0o644}, strings.NewReader("")))
		}
	})
	require.Contains(t, d.debugfs("htree_dump /dir"), "Indirect levels: 0")
	d.level(w, func() {
		for i := 300; i < files; i++ {
			must(w.Create(dir, name(i), Attr{Mode: 0o644}, strings.NewReader("")))
		}
	})
	require.Contains(t, d.debugfs("htree_dump /dir"), "Indirect levels: 1")
	// e2fsck checks that each name is where the index says; debugfs reads every block.
	for _, i := range []int{0, 299, 300, 51717, files - 1} {
		require.Contains(t, d.debugfs("stat /dir/"+name(i)), "Type: regular", i)
	}
	d.level(w, func() {
		for i := 5; i < files; i++ {
			require.NoError(t, w.Remove(dir, name(i)))
		}
	})
	require.Len(t, w.Names(dir), 5)
}

func TestDirectoryOfManyDirectories(t *testing.T) {
	d, w := newDisk(t), New()
	d.level(w, func() {
		for i := range 65100 {
			must(w.Mkdir(Root, fmt.Sprint(i), Attr{Mode: 0o755}))
		}
	})
	require.Contains(t, d.debugfs("stat /"), "Links: 1 ")
	d.level(w, func() {
		for i := range 65000 {
			require.NoError(t, w.Remove(Root, fmt.Sprint(i)))
		}
	})
	require.Contains(t, d.debugfs("stat /"), "Links: 103 ")
}

func TestLinksOfAFile(t *testing.T) {
	d, w := newDisk(t), New()
	d.level(w, func() {
		file := must(w.Create(Root, "file", Attr{Mode: 0o644}, strings.NewReader("x")))
		for i := 1; i < 65000; i++ {
			require.NoError(t, w.Link(Root, fmt.Sprint(i), file))
		}
		require.ErrorContains(t, w.Link(Root, "last", file), "it has 65000 names already")
	})
}

// sparse is a file of zeros, but for a byte at each multiple of step.
type sparse struct{ size, step, off int64 }

func (s *sparse) Read(p []byte) (int, error) {
	if s.off == s.size {
		return 0, io.EOF
	}
	p = p[:min(int64(len(p)), s.size-s.off)]
	clear(p)
	for i := (s.step - s.off%s.step) % s.step; i < int64(len(p)); i += s.step {
		p[i] = 'x'
	}
	s.off += int64(len(p))
	return len(p), nil
}

func TestSparseFilesAndTreesOfExtents(t *testing.T) {
	d, w := newDisk(t), New()
	d.level(w, func() {
		must(w.Create(Root, "four", Attr{Mode: 0o644}, &sparse{size: 4 << 20, step: 1 << 20}))
		must(w.Create(Root, "deep", Attr{Mode: 0o644}, &sparse{size: 200 << 20, step: 128 << 10}))
		must(w.Create(Root, "zeros", Attr{Mode: 0o644}, &sparse{size: 50<<20 + 7, step: 1 << 40}))
	})
	require.Less(t, len(d.written), 30000)
	require.Contains(t, d.debugfs("stat /zeros"), "Size: 52428807")
	got := d.cat("/deep")
	want := must(io.ReadAll(&sparse{size: 200 << 20, step: 128 << 10}))
	require.True(t, got == string(want))
	d.level(w, func() { require.NoError(t, w.Remove(Root, "deep")) })
}

// TestFileOfManyGroups has a file of more than 42 GiB, of which little is written.
func TestFileOfManyGroups(t *testing.T) {
	if testing.Short() {
		t.Skip("reads 43 GiB of zeros")
	}
	d, w := newDisk(t), New()
	d.hollow = true
	d.level(w, func() {
		must(w.Create(Root, "large", Attr{Mode: 0o644}, &sparse{size: 43 << 30, step: 64 << 10}))
	})
	require.Greater(t, w.Size(), int64(43<<30))
}

func TestLevelsDependOnWhatWasDone(t *testing.T) {
	build := func(replay bool) map[int64][]byte {
		w := New()
		w.Begin(nil)
		if !replay {
			w.Begin(&memory{})
			w.level--
		}
		dir := must(w.Mkdir(Root, "dir", Attr{Mode: 0o755, Xattrs: map[string]string{
			"user.a": "1", "user.b": "2", "security.capability": "xxxx"}}))
		for i := range 500 {
			must(w.Create(dir, fmt.Sprint("file", i), Attr{Mode: 0o644}, text4k("y", 9000)))
		}
		require.NoError(t, w.Finish())
		m := &memory{}
		w.Begin(m)
		must(w.Create(dir, "more", Attr{Mode: 0o644}, text4k("z", 9000)))
		require.NoError(t, w.Remove(dir, "file7"))
		require.NoError(t, w.Finish())
		return m.blocks
	}
	first := build(false)
	require.NotEmpty(t, first)
	require.Equal(t, first, build(false))
	require.Equal(t, first, build(true), "a level that was not written changes nothing")
}

type memory struct{ blocks map[int64][]byte }

func (m *memory) WriteAt(p []byte, off int64) (int, error) {
	if m.blocks == nil {
		m.blocks = make(map[int64][]byte)
	}
	for i := 0; i < len(p); i += BlockSize {
		m.blocks[off+int64(i)] = bytes.Clone(p[i : i+BlockSize])
	}
	return len(p), nil
}

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
