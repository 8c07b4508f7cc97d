package adapter

import (
	"archive/tar"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// model is what layers mean, said as simply as possible: paths, and what is there. It knows nothing
// of links in paths, which the generator does not make.
type model map[string]*node

// below lists the paths under a directory.
func (m model) below(dir string) (paths []string) {
	for p := range m {
		if p != dir && (dir == "" || strings.HasPrefix(p, dir+"/")) {
			paths = append(paths, p)
		}
	}
	slices.Sort(paths)
	return paths
}

func (m model) remove(p string) {
	for _, q := range m.below(p) {
		delete(m, q)
	}
	delete(m, p)
}

// parents makes the directories above a path, and tells whether that can be.
func (m model) parents(p string) bool {
	for dir := path.Dir(p); dir != "."; dir = path.Dir(dir) {
		if n := m[dir]; n != nil && n.Mode&unix.S_IFMT != unix.S_IFDIR {
			return false
		}
	}
	for dir := path.Dir(p); dir != "."; dir = path.Dir(dir) {
		if m[dir] == nil {
			m[dir] = &node{Mode: unix.S_IFDIR | 0o755, Mtime: time.Unix(0, 0).UTC()}
		}
	}
	return true
}

// generator makes a stack of layers and what they mean.
type generator struct {
	*rand.Rand
	m model
}

func (g *generator) path() string {
	p := string(rune('a' + g.IntN(4)))
	for g.IntN(2) == 0 {
		p += "/" + string(rune('a'+g.IntN(4)))
	}
	return p
}

// header has random attributes. n is the same for the model.
func (g *generator) header(name string) (h tar.Header, n *node) {
	mode := uint32(g.IntN(0o10000))
	when := time.Unix(g.Int64N(1<<33)-1<<31, g.Int64N(1e9)).UTC()
	h = tar.Header{Name: name, Mode: int64(mode), Uid: g.IntN(1 << 20), Gid: g.IntN(70000),
		ModTime: when}
	n = &node{Mode: mode, UID: uint32(h.Uid), GID: uint32(h.Gid), Mtime: when}
	if g.IntN(6) == 0 {
		h.PAXRecords = make(map[string]string)
		n.Xattrs = make(map[string]string)
		for range 1 + g.IntN(3) {
			name := "trusted." + string(rune('a'+g.IntN(5)))
			value := strings.Repeat("v", 1+g.IntN(120)) // an empty one is none in a PAX header
			h.PAXRecords["SCHILY.xattr."+name], n.Xattrs[name] = value, value
		}
	}
	return h, n
}

// layer makes a layer: the whiteouts, then the rest.
func (g *generator) layer() (whiteouts, items []item) {
	lower := slices.Sorted(maps.Keys(g.m))
	for _, p := range lower {
		switch g.IntN(20) {
		case 0:
			whiteouts = append(whiteouts, file(path.Join(path.Dir(p), ".wh."+path.Base(p)), ""))
			g.m.remove(p)
		case 1:
			if n := g.m[p]; n != nil && n.Mode&unix.S_IFMT == unix.S_IFDIR {
				whiteouts = append(whiteouts, file(path.Join(p, ".wh..wh..opq"), ""))
				for _, q := range g.m.below(p) {
					delete(g.m, q)
				}
			}
		}
	}
	for range g.IntN(12) {
		if i, ok := g.item(); ok {
			items = append(items, i)
		}
	}
	return whiteouts, items
}

// item makes an entry and applies it to the model.
func (g *generator) item() (item, bool) {
	p := g.path()
	old := g.m[p]
	h, n := g.header(p)
	i := item{Header: h}
	kind := g.IntN(10)
	var target string
	if kind == 9 {
		var all []string
		for q, n := range g.m {
			if n.Mode&unix.S_IFMT != unix.S_IFDIR && q != p && !strings.HasPrefix(q, p+"/") {
				all = append(all, q)
			}
		}
		if len(all) == 0 {
			return item{}, false
		}
		slices.Sort(all)
		target = all[g.IntN(len(all))]
	}
	if !g.m.parents(p) {
		return item{}, false
	}
	switch kind {
	case 0, 1, 2:
		i.Typeflag = tar.TypeDir
		n.Mode |= unix.S_IFDIR
		if old != nil && old.Mode&unix.S_IFMT == unix.S_IFDIR {
			g.m[p] = n // its files stay
			return i, true
		}
	case 3:
		i.Typeflag, i.Linkname = tar.TypeSymlink, strings.Repeat("t", 1+g.IntN(90))
		n.Mode, n.Content = unix.S_IFLNK|0o777, i.Linkname
	case 4:
		i.Typeflag = tar.TypeFifo
		n.Mode |= unix.S_IFIFO
	case 5:
		i.Typeflag, i.Devmajor, i.Devminor = tar.TypeBlock, g.Int64N(4096), g.Int64N(1<<20)
		n.Mode |= unix.S_IFBLK
		n.Dev = unix.Mkdev(uint32(i.Devmajor), uint32(i.Devminor))
	case 9:
		i.Typeflag, i.Linkname = tar.TypeLink, target
		n = g.m[target]
	default:
		i.Typeflag = tar.TypeReg
		i.content = strings.Repeat(string(rune('a'+g.IntN(26))), g.IntN(9000))
		n.Mode, n.Content = n.Mode|unix.S_IFREG, i.content
	}
	g.m.remove(p)
	g.m[p] = n
	return i, true
}

// want is the model as readTree would return it.
func (m model) want() map[string]node {
	first, links := make(map[*node]string), make(map[*node]uint64)
	paths := slices.Sorted(maps.Keys(m))
	slices.SortFunc(paths, func(a, b string) int { // as a walk goes
		return slices.Compare(strings.Split(a, "/"), strings.Split(b, "/"))
	})
	for _, p := range paths {
		if links[m[p]]++; first[m[p]] == "" {
			first[m[p]] = p
		}
	}
	tree := make(map[string]node)
	for p, n := range m {
		tree[p] = *n
		if n.Mode&unix.S_IFMT != unix.S_IFDIR {
			c := *n
			c.Links, c.Same = links[n], first[n]
			tree[p] = c
		}
	}
	return tree
}

// TestGeneratedStacks compares what the kernel sees of generated stacks of layers with a model.
// KUBEVIRT_DISK_STACKS is how many.
func TestGeneratedStacks(t *testing.T) {
	stacks := 25
	if testing.Short() {
		stacks = 5
	}
	if n, err := strconv.Atoi(os.Getenv("KUBEVIRT_DISK_STACKS")); err == nil {
		stacks = n
	}
	for seed := range stacks {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			g := &generator{rand.New(rand.NewPCG(uint64(seed), 7)), make(model)}
			var layers [][]byte
			for range 1 + g.IntN(5) {
				whiteouts, items := g.layer()
				// Whiteouts mean the same wherever they stand, but where an entry would go
				// through what they remove.
				mixed := slices.Clone(items)
				for _, w := range whiteouts {
					mixed = slices.Insert(mixed, g.IntN(len(mixed)+1), w)
				}
				archive := layerOf(t, mixed...)
				if _, err := Build(context.Background(), imageOf(append(layers, archive)...),
					t.TempDir(), Options{}); err != nil {
					archive = layerOf(t, append(whiteouts, items...)...)
				}
				layers = append(layers, archive)
			}
			tree := treeOf(t, layers...)
			delete(tree, "")
			require.Equal(t, g.m.want(), tree)
		})
	}
}
