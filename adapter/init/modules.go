package guestinit

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// modules are the kernel modules of the initramfs. Only modules that the machine's devices ask for
// are loaded, because each takes time at the start.
type modules struct {
	dir    string
	needs  map[string][]string // by name: the modules to load before it
	alias  []moduleAlias
	loaded map[string]bool
	seen   map[string]bool // modaliases that were looked up
	insert func(file string) error
}

type moduleAlias struct{ pattern, name string }

// readModules reads the index that adapter/initrd has written.
func readModules(dir string) (*modules, error) {
	text, err := os.ReadFile(filepath.Join(dir, "index"))
	if err != nil {
		return nil, err
	}
	m := &modules{dir: dir, needs: map[string][]string{}, loaded: map[string]bool{},
		seen: map[string]bool{}, insert: insertModule}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		switch {
		case len(words) >= 2 && words[0] == "module":
			m.needs[words[1]] = words[2:]
		case len(words) == 3 && words[0] == "alias":
			m.alias = append(m.alias, moduleAlias{pattern: words[1], name: words[2]})
		}
	}
	return m, nil
}

// devicePaths are the files in which the kernel describes devices.
var devicePaths = []string{
	"/sys/bus/*/devices/*/modalias",
	"/sys/class/input/input*/modalias",
	"/sys/devices/system/cpu/modalias",
}

// loadForDevices loads the modules of all devices that the kernel knows, and of devices that appear
// because of them. Call it again for devices that appear later.
func (m *modules) loadForDevices() (err error) {
	for again := true; again; {
		again = false
		for _, pattern := range devicePaths {
			files, _ := filepath.Glob(pattern) // the pattern is right
			for _, file := range files {
				text, readErr := os.ReadFile(file)
				if readErr != nil {
					continue // the device is gone
				}
				more, loadErr := m.loadFor(strings.TrimSpace(string(text)))
				again = again || more
				err = errors.Join(err, loadErr)
			}
		}
	}
	return err
}

// loadFor loads the modules for a device. more: at least one of them was new.
func (m *modules) loadFor(modalias string) (more bool, err error) {
	if m.seen[modalias] {
		return false, nil
	}
	m.seen[modalias] = true
	for _, a := range m.alias {
		if ok, _ := path.Match(a.pattern, modalias); ok && !m.loaded[a.name] {
			more = true
			err = errors.Join(err, m.load(a.name))
		}
	}
	return more, err
}

// load loads a module after those that it needs. One that cannot be loaded is not tried again.
func (m *modules) load(name string) error {
	for _, one := range append(append([]string(nil), m.needs[name]...), name) {
		if m.loaded[one] {
			continue
		}
		m.loaded[one] = true
		if err := m.insert(filepath.Join(m.dir, one+".ko")); err != nil {
			return fmt.Errorf("kernel module %s: %w", one, err)
		}
	}
	return nil
}

func insertModule(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}
