package adapter

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/adapter/ext4"
	"kubevirt.io/disk/internal/testtool"
)

// setgidDirectory is an entry of a directory with the setgid bit and a group.
func setgidDirectory(name string, group int) item {
	d := directory(name)
	d.Mode, d.Gid = 0o2770, group
	return d
}

// attrsOf applies layers, and returns the attributes of directories after that.
func attrsOf(t *testing.T, dirs []string, layers ...[]item) map[string]ext4.Attr {
	t.Helper()
	a := newApplier(defaultMaxBytes, defaultMaxFiles)
	for _, items := range layers {
		a.fs.Begin(nil)
		require.NoError(t, a.apply(bytes.NewReader(layerOf(t, items...))))
	}
	found := make(map[string]ext4.Attr)
	for _, name := range dirs {
		dir, ok := testtool.Must2(a.dir(name, false))(t)
		require.True(t, ok, name)
		found[name] = a.fs.Attr(dir)
	}
	return found
}

// TestLateWhiteoutOfASetgidDirectory: a directory for which a layer has no entry follows the
// directory that it is in, and not one that the layer removes, wherever the whiteout stands.
func TestLateWhiteoutOfASetgidDirectory(t *testing.T) {
	plain := ext4.Attr{Mode: 0o755}
	group := func(gid uint32) ext4.Attr { return ext4.Attr{Mode: 0o2755, GID: gid} }
	setgid := setgidDirectory("d/x", 7)
	for name, c := range map[string]struct {
		lower    []item
		whiteout string
		items    []item
		want     map[string]ext4.Attr
	}{
		"removed": {[]item{setgidDirectory("d", 5)}, ".wh.d",
			[]item{file("d/x/y/f", "")},
			map[string]ext4.Attr{"d": plain, "d/x": plain, "d/x/y": plain}},
		"removed below another one": {[]item{setgidDirectory("p", 6),
			setgidDirectory("p/d", 5)}, "p/.wh.d", []item{file("p/d/x/f", "")},
			map[string]ext4.Attr{"p": {Mode: 0o2770, GID: 6}, "p/d": group(6), "p/d/x": group(6)}},
		"opaque": {[]item{setgidDirectory("d", 5), setgidDirectory("d/e", 8)}, "d/.wh..wh..opq",
			[]item{file("d/x/f", ""), file("d/e/y/f", "")},
			map[string]ext4.Attr{"d": {Mode: 0o2770, GID: 5}, "d/x": group(5), "d/e": group(5),
				"d/e/y": group(5)}},
		"with an entry of its own behind": {[]item{setgidDirectory("d", 5)}, ".wh.d",
			[]item{file("d/x/y/f", ""), setgid},
			map[string]ext4.Attr{"d": plain, "d/x": {Mode: 0o2770, GID: 7}, "d/x/y": plain}},
		"with an entry of its own before": {[]item{setgidDirectory("d", 5)}, ".wh.d",
			[]item{setgid, file("d/x/y/f", "")},
			map[string]ext4.Attr{"d": plain, "d/x": {Mode: 0o2770, GID: 7}, "d/x/y": group(7)}},
	} {
		t.Run(name, func(t *testing.T) {
			var dirs []string
			for dir := range c.want {
				dirs = append(dirs, dir)
			}
			for at := range len(c.items) + 1 {
				layer := append(append(append([]item{}, c.items[:at]...), file(c.whiteout, "")),
					c.items[at:]...)
				got := attrsOf(t, dirs, c.lower, layer)
				for dir, a := range got { // the times come from the archive
					a.Seconds, a.Nanoseconds = 0, 0
					got[dir] = a
				}
				require.Equal(t, c.want, got, "the whiteout is entry %d", at)
			}
		})
	}
}

// TestWhiteoutsThatHideMuch: a directory that is hidden again and again is searched only a limited
// number of times.
func TestWhiteoutsThatHideMuch(t *testing.T) {
	a := newApplier(defaultMaxBytes, defaultMaxFiles)
	lower, items := []item{file("d/old", "")}, []item{}
	for _, name := range []string{"a", "b", "c", "d"} {
		items = append(items, file("d/"+name, ""), file(".wh.d", ""))
	}
	a.fs.Begin(nil)
	require.NoError(t, a.apply(bytes.NewReader(layerOf(t, lower...))))
	a.fs.Begin(nil)
	a.stepsLeft = 13
	require.ErrorContains(t, a.apply(bytes.NewReader(layerOf(t, items...))), "hide too much")
}
