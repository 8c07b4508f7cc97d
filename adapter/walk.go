package adapter

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"kubevirt.io/disk/adapter/ext4"
)

// maxLinks is how many symbolic links a path may lead through, as in path_resolution(7).
const maxLinks = 40

// implied returns the attributes of a directory without an entry in any layer. In a directory with
// the setgid bit, it gets the group and the bit, as from mkdir(2).
func (a *applier) implied(in ext4.Inode) ext4.Attr {
	const setgid = 0o2000
	attr := ext4.Attr{Mode: 0o755}
	if above := a.fs.Attr(in); above.Mode&setgid != 0 {
		attr.Mode, attr.GID = attr.Mode|setgid, above.GID
	}
	return attr
}

// dir finds a directory of the tree. Like runtimes, it follows symbolic links inside the tree, for
// example if /lib is a link to usr/lib. With create, it makes missing directories. Without create,
// ok is false if something is missing.
func (a *applier) dir(name string, create bool) (at ext4.Inode, ok bool, err error) {
	at = ext4.Root
	todo := strings.Split(name, "/")
	slices.Reverse(todo)
	links := 0
	for len(todo) > 0 {
		part := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if a.stepsLeft--; a.stepsLeft < 0 {
			return 0, false, errors.New("the paths of the image lead through too many directories")
		}
		switch part {
		case "", ".":
			continue
		case "..":
			at = a.fs.Parent(at)
			continue
		}
		e, there := a.fs.Lookup(at, part)
		switch {
		case !there && !create:
			return 0, false, nil
		case !there:
			if a.filesLeft--; a.filesLeft < 0 {
				return 0, false, a.tooManyFiles()
			}
			in := at
			if at, err = a.mkdir(dirEntry{in, part}, a.implied(in)); err != nil {
				return 0, false, err
			}
			if !a.explicit.Has(int64(in)) {
				a.implicit.Add(int64(at))
			}
		case a.fs.Type(e.Inode) == ext4.TypeDir:
			at = e.Inode
		case a.fs.Type(e.Inode) == ext4.TypeLink:
			if links++; links > maxLinks {
				return 0, false, fmt.Errorf("leads through more than %d symbolic links", maxLinks)
			}
			if e.Level < a.fs.Level() {
				a.follow(dirEntry{at, part})
			}
			target := a.fs.Target(e.Inode)
			if strings.HasPrefix(target, "/") {
				at = ext4.Root
			}
			parts := strings.Split(target, "/")
			slices.Reverse(parts)
			todo = append(todo, parts...)
		default:
			return 0, false, fmt.Errorf("lies in %s, which is not a directory", quoted(part))
		}
	}
	return at, true, nil
}

// follow records that an entry of the layer leads through a symbolic link of a lower layer.
func (a *applier) follow(link dirEntry) {
	a.used[link] = followed
	for dir := link.dir; dir != ext4.Root && !a.aboveLinks.Has(int64(dir)); dir = a.fs.Parent(dir) {
		a.aboveLinks.Add(int64(dir))
	}
}

// whiteout removes the entries of lower layers under a name. It does not touch entries of this
// layer, wherever they are in the archive.
func (a *applier) whiteout(dirName, base string) error {
	name := strings.TrimPrefix(base, whiteout)
	if base != whiteoutOpaque && strings.HasPrefix(base, whiteoutMeta) {
		return nil
	}
	if name == "" || name == "." || name == ".." {
		return errors.New("is a whiteout without a name")
	}
	dir, ok, err := a.dir(dirName, false)
	if err != nil || !ok {
		return err
	}
	if base == whiteoutOpaque {
		return a.clear(dir, nil)
	}
	if e, there := a.fs.Lookup(dir, name); there {
		return a.hide(dirEntry{dir, name}, e, nil)
	}
	return nil
}

// clear hides all entries of lower layers in a directory. See hide.
func (a *applier) clear(dir ext4.Inode, attr *ext4.Attr) error {
	names := a.fs.Names(dir)
	if a.stepsLeft -= int64(len(names)); a.stepsLeft < 0 { // perhaps the same directory again
		return errors.New("the whiteouts of the image hide too much")
	}
	for _, name := range names {
		if e, there := a.fs.Lookup(dir, name); there {
			if err := a.hide(dirEntry{dir, name}, e, attr); err != nil {
				return err
			}
		}
	}
	return nil
}

// hide removes the entries of lower layers under a name. Those of this layer stay. If this layer
// has put something into a directory, but has no entry for the directory itself, the directory
// stays and gets attr: a runtime would have made it again. attr is nil if the parent directory is
// not hidden.
func (a *applier) hide(at dirEntry, e ext4.Entry, attr *ext4.Attr) error {
	if a.used[at] != unused { // even if this layer has replaced it since
		return fmt.Errorf("removes %s, through which other entries of the layer lead",
			quoted(at.name))
	}
	isDir, own := a.fs.Type(e.Inode) == ext4.TypeDir, e.Level == a.fs.Level()
	if e.Level == 0 || own && (!isDir || attr == nil) {
		return nil
	}
	if isDir {
		explicit := a.explicit.Has(int64(e.Inode))
		if !own {
			implied := a.implied(at.dir)
			attr = &implied
		}
		// first, because the entries in the directory take attributes from it
		if !explicit && (!own || a.implicit.Has(int64(e.Inode))) {
			if err := a.fs.SetAttr(e.Inode, *attr); err != nil {
				return err
			}
		}
		if err := a.clear(e.Inode, attr); err != nil || own || explicit || !a.fs.Empty(e.Inode) {
			return err
		}
	}
	return a.fs.Remove(at.dir, at.name)
}
