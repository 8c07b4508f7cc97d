package adapter

import (
	"archive/tar"
	"bytes"
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

	"kubevirt.io/disk/internal/testtool"
)

// model is the meaning of layers, as simple as possible: paths, and the files there. It does not
// support links in paths; the generator does not make any.
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

// parents makes the directories above a path, and reports whether that is possible.
func (m model) parents(p string) bool {
	for dir := path.Dir(p); dir != "."; dir = path.Dir(dir) {
		if n := m[dir]; n != nil && n.Mode&unix.S_IFMT != unix.S_IFDIR {
			return false
		}
	}
	for i := range p {
		if dir := p[:i]; p[i] == '/' && m[dir] == nil {
			m[dir] = &node{Mode: unix.S_IFDIR | 0o755, Mtime: time.Unix(0, 0).UTC()}
			if above := m[path.Dir(dir)]; above != nil && above.Mode&unix.S_ISGID != 0 {
				m[dir].Mode, m[dir].GID = m[dir].Mode|unix.S_ISGID, above.GID
			}
		}
	}
	return true
}

// generator makes a stack of layers and their meaning.
type generator struct {
	*rand.Rand
	m model
	// from and to are the seconds between which the times are.
	from, to int64
	xattrs   string          // prefix of their names
	seen     map[string]bool // paths of this layer; nil: it is not for podman
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
	when := time.Unix(g.from+g.Int64N(g.to-g.from), g.Int64N(1e9)).UTC()
	h = tar.Header{Name: name, Mode: int64(mode), Uid: g.IntN(1 << 20), Gid: g.IntN(70000),
		ModTime: when}
	n = &node{Mode: mode, UID: uint32(h.Uid), GID: uint32(h.Gid), Mtime: when}
	if g.IntN(6) == 0 {
		h.PAXRecords = make(map[string]string)
		n.Xattrs = make(map[string]string)
		for range 1 + g.IntN(3) {
			name := g.xattrs + string(rune('a'+g.IntN(5)))
			value := strings.Repeat("v", 1+g.IntN(120)) // an empty one is none in a PAX header
			h.PAXRecords["SCHILY.xattr."+name], n.Xattrs[name] = value, value
		}
	}
	return h, n
}

// layer makes a layer: the whiteouts, then the rest.
func (g *generator) layer() (whiteouts, items []item) {
	clear(g.seen)
	lower := slices.Sorted(maps.Keys(g.m))
	for _, p := range lower {
		if g.seen != nil && g.m[p] == nil {
			continue
		}
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

// fitsPodman reports whether podman accepts an entry of the layer.
func (g *generator) fitsPodman(p string, dir bool) bool {
	if g.seen[p] {
		return false
	}
	for q := range g.seen {
		if strings.HasPrefix(q, p+"/") && !dir {
			return false
		}
	}
	g.seen[p] = true
	return true
}

// item makes an entry and applies it to the model.
func (g *generator) item() (item, bool) {
	p := g.path()
	old := g.m[p]
	h, n := g.header(p)
	i := item{Header: h}
	kind := g.IntN(10)
	if g.seen != nil && !g.fitsPodman(p, kind <= 2) {
		return item{}, false
	}
	var target string
	if kind == 9 {
		var all []string
		for q, n := range g.m {
			kind := n.Mode & unix.S_IFMT
			if kind != unix.S_IFDIR && q != p && !strings.HasPrefix(q, p+"/") &&
				(kind == unix.S_IFREG || g.seen == nil) {
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
	if g.seen != nil && kind <= 5 {
		i.PAXRecords, n.Xattrs = nil, nil
	}
	switch kind {
	case 0, 1, 2:
		i.Typeflag = tar.TypeDir
		if g.seen == nil { // the meaning of entries below it would depend on their order
			i.Mode, n.Mode = i.Mode&^unix.S_ISGID, n.Mode&^unix.S_ISGID
		}
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
		n = g.m[target].linked(n)
	default:
		i.Typeflag = tar.TypeReg
		i.content = strings.Repeat(string(rune('a'+g.IntN(26))), g.IntN(9000))
		n.Mode, n.Content = n.Mode|unix.S_IFREG, i.content
	}
	g.m.remove(p)
	g.m[p] = n
	return i, true
}

// linked is a file that gets another name, by an entry with the attributes of n.
func (old *node) linked(n *node) *node {
	old.UID, old.GID = n.UID, n.GID
	if old.Mode&unix.S_IFMT != unix.S_IFLNK {
		old.Mode, old.Mtime = old.Mode&unix.S_IFMT|n.Mode, n.Mtime
	}
	if old.Xattrs == nil {
		old.Xattrs = n.Xattrs
	}
	maps.Copy(old.Xattrs, n.Xattrs)
	return old
}

// want is the model in the form of readTree.
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

// stack is a generated stack of layers.
type stack struct {
	seed   int
	layers [][]item // the lowest first
	want   map[string]node
}

// generate makes a stack. A whiteout has the same meaning wherever it stands, unless an entry leads
// through what it removes, or replaces that. Such a layer is refused, so its whiteouts come first.
//
// With podman, whiteouts are always first, as it applies a layer in the order of its entries. It
// refuses a layer that has a path twice or something below what is replaced later, makes the
// directory of a whiteout, and knows no times before 1970. Its storage vfs copies only those
// extended attributes to the next layer that begin with user, which only files and directories
// have, adds up those of a directory that is in several layers, and copies no hard links of
// anything but files.
func generate(t *testing.T, seed int, podman bool) stack {
	g := &generator{Rand: rand.New(rand.NewPCG(uint64(seed), 7)), m: make(model), from: -1 << 31,
		to: 1<<33 - 1<<31, xattrs: "trusted."}
	if podman {
		g.from, g.to, g.xattrs, g.seen = 1, 1<<32, "user.", make(map[string]bool)
	}
	s := stack{seed: seed}
	var below [][]byte
	for range 1 + g.IntN(5) {
		whiteouts, items := g.layer()
		layer := slices.Clone(items)
		for _, w := range whiteouts {
			layer = slices.Insert(layer, g.IntN(len(layer)+1), w)
		}
		if podman || applied(append(below, layerOf(t, layer...))) != nil {
			layer = append(whiteouts, items...)
		}
		below = append(below, layerOf(t, layer...))
		s.layers = append(s.layers, layer)
	}
	require.NoError(t, applied(below), "seed %d", seed)
	s.want = g.m.want()
	return s
}

// applied reports whether layers can be applied. It writes nothing.
func applied(archives [][]byte) error {
	a := newApplier(defaultMaxBytes, defaultMaxFiles)
	for _, archive := range archives {
		a.fs.Begin(nil)
		if err := a.apply(bytes.NewReader(archive)); err != nil {
			return err
		}
	}
	return nil
}

// together makes one image of many stacks, each in a directory of its own.
func together(t *testing.T, stacks []stack) (archives [][]byte) {
	t.Helper()
	var layers [][]item
	for _, s := range stacks {
		top := directory(s.home())
		top.ModTime = time.Unix(1, 0)
		for k, items := range s.layers {
			if k == len(layers) {
				layers = append(layers, nil)
			}
			if k == 0 {
				layers[k] = append(layers[k], top)
			}
			for _, i := range items {
				i.Name = path.Join(s.home(), i.Name)
				if i.Typeflag == tar.TypeLink {
					i.Linkname = path.Join(s.home(), i.Linkname)
				}
				layers[k] = append(layers[k], i)
			}
		}
	}
	for _, items := range layers {
		archives = append(archives, layerOf(t, items...))
	}
	return archives
}

func (s stack) home() string { return fmt.Sprint("stack", s.seed) }

// byHome splits a tree by stack.
func byHome(tree map[string]node) map[string]map[string]node {
	all := make(map[string]map[string]node)
	for p, n := range tree {
		home, rest, ok := strings.Cut(p, "/")
		if all[home] == nil {
			all[home] = make(map[string]node)
		}
		if ok {
			n.Same = strings.TrimPrefix(n.Same, home+"/")
			all[home][rest] = n
		}
	}
	return all
}

// stacks is how many stacks to generate: the number in the environment, or a default.
func stacks(t *testing.T, some int) int {
	n, err := strconv.Atoi(os.Getenv("KUBEVIRT_DISK_STACKS"))
	switch {
	case err == nil:
		return n
	case testing.Short():
		return some / 4
	}
	return some
}

// atOnce is how many stacks are in one image, which takes less time than an image for each.
const atOnce = 250

// TestGeneratedStacks compares what the kernel sees of generated stacks of layers with a model.
// KUBEVIRT_DISK_STACKS is how many.
func TestGeneratedStacks(t *testing.T) {
	for first, n := 0, stacks(t, 200); first < n; first += atOnce {
		t.Run(fmt.Sprint(first), func(t *testing.T) {
			var all []stack
			for seed := first; seed < min(first+atOnce, n); seed++ {
				all = append(all, generate(t, seed, false))
			}
			got := byHome(treeOf(t, together(t, all)...))
			for _, s := range all {
				require.Equal(t, s.want, got[s.home()], "seed %d", s.seed)
			}
		})
	}
}

// TestGeneratedStacksAsPodmanMountsThem compares generated stacks with podman's mounts.
func TestGeneratedStacksAsPodmanMountsThem(t *testing.T) {
	testtool.Need(t, "podman")
	testtool.Needs(t, "root (to mount)", os.Geteuid() == 0)
	start := time.Now()
	var all []stack
	for seed := range stacks(t, 80) {
		all = append(all, generate(t, seed, true))
	}
	archives := together(t, all)
	theirs := byHome(podmanTree(t, shortDir(t), layoutOf(t, archives...)))
	ours := byHome(treeOf(t, archives...))
	for _, s := range all {
		want, got := theirs[s.home()], ours[s.home()]
		for p, n := range want {
			// With podman, a directory has the time of the last entry in it.
			if n.Mode&unix.S_IFMT == unix.S_IFDIR && n.Mtime.After(start.Add(-time.Minute)) &&
				n.Mtime.Before(time.Now()) {
				n.Mtime = got[p].Mtime
				want[p] = n
			}
		}
		require.Equal(t, want, got, "seed %d", s.seed)
		require.Equal(t, s.want, got, "seed %d", s.seed)
	}
}
