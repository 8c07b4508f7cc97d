package initrd

import (
	"bytes"
	"debug/elf"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Modules is a selection of a kernel's modules, with everything that they depend on.
type Modules struct {
	dir   string            // of the modules in the unpacked package: .../lib/modules/VERSION
	paths map[string]string // every module of the kernel by name, relative to dir
	built map[string]bool   // modules that are part of the kernel image
	deps  map[string][]string
	alias map[string][]string
	order []string // the chosen modules, dependencies first
}

// FindModules chooses modules by name from an unpacked kernel package. It leaves out modules that
// are built into the kernel. An unknown name is an error. The dependencies come from the modules
// themselves, because modules.dep is made only at installation.
func FindModules(kernelTree string, names []string) (*Modules, error) {
	m, err := listModules(kernelTree)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if err := m.choose(moduleName(name)); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// listModules lists the modules of an unpacked kernel package, and chooses none.
func listModules(kernelTree string) (*Modules, error) {
	found, err := filepath.Glob(filepath.Join(kernelTree, "lib", "modules", "*"))
	if err != nil {
		return nil, err
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("%s/lib/modules has %d kernels, want one", kernelTree, len(found))
	}
	m := &Modules{dir: found[0], paths: map[string]string{}, built: map[string]bool{},
		deps: map[string][]string{}, alias: map[string][]string{}}
	err = filepath.WalkDir(m.dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".ko") {
			m.paths[moduleName(path)] = strings.TrimPrefix(path, m.dir+"/")
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	builtin, err := os.ReadFile(filepath.Join(m.dir, "modules.builtin"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(builtin)) {
		m.built[moduleName(strings.TrimSpace(line))] = true
	}
	return m, nil
}

// Release is the version of the kernel, like the output of uname -r.
func (m *Modules) Release() string { return filepath.Base(m.dir) }

// Dir is the directory of all modules in the unpacked package.
func (m *Modules) Dir() string { return m.dir }

// Order returns the chosen modules in the order in which they can be loaded.
func (m *Modules) Order() []string { return m.order }

// Path is the path of a chosen module, relative to Dir.
func (m *Modules) Path(name string) string { return m.paths[name] }

// Aliases are the patterns of the devices that need a chosen module.
func (m *Modules) Aliases(name string) []string { return m.alias[name] }

// Content reads a chosen module.
func (m *Modules) Content(name string) ([]byte, error) {
	return os.ReadFile(filepath.Join(m.dir, m.paths[name]))
}

// moduleName is the name of the module in a path. The kernel treats '-' and '_' as equal.
func moduleName(path string) string {
	return strings.ReplaceAll(strings.TrimSuffix(filepath.Base(path), ".ko"), "-", "_")
}

func (m *Modules) choose(name string) error {
	if _, done := m.deps[name]; done || m.built[name] {
		return nil
	}
	path, ok := m.paths[name]
	if !ok {
		return fmt.Errorf("the kernel of %s has no module %q", m.dir, name)
	}
	info, err := moduleInfo(filepath.Join(m.dir, path))
	if err != nil {
		return err
	}
	m.deps[name] = nil
	m.alias[name] = info["alias"]
	var needs []string
	for _, list := range info["depends"] {
		needs = append(needs, strings.Split(list, ",")...)
	}
	for _, soft := range info["softdep"] {
		if list, ok := strings.CutPrefix(soft, "pre: "); ok {
			for dep := range strings.FieldsSeq(list) {
				// It may be an alias, or a module of another configuration. The kernel works
				// without it.
				if m.paths[moduleName(dep)] != "" {
					needs = append(needs, dep)
				}
			}
		}
	}
	for _, dep := range needs {
		if dep = moduleName(dep); dep == "." || dep == "" {
			continue
		}
		if err := m.choose(dep); err != nil {
			return fmt.Errorf("%s needs %w", name, err)
		}
		if !m.built[dep] {
			m.deps[name] = append(m.deps[name], dep)
		}
	}
	m.order = append(m.order, name)
	return nil
}

// moduleInfo reads a module's section .modinfo: texts of the form "key=value" that end with NUL.
func moduleInfo(path string) (map[string][]string, error) {
	file, err := elf.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	defer file.Close()
	section := file.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("%s has no section .modinfo", path)
	}
	data, err := section.Data()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	info := map[string][]string{}
	for text := range bytes.SplitSeq(data, []byte{0}) {
		if key, value, ok := strings.Cut(string(text), "="); ok {
			info[key] = append(info[key], value)
		}
	}
	return info, nil
}

// Needs lists everything that a module depends on, nearest first, as in modules.dep. The last one
// must be loaded first.
func (m *Modules) Needs(name string) []string {
	wanted := map[string]bool{}
	var mark func(string)
	mark = func(name string) {
		for _, dep := range m.deps[name] {
			if !wanted[dep] {
				wanted[dep] = true
				mark(dep)
			}
		}
	}
	mark(name)
	var list []string
	for i := len(m.order) - 1; i >= 0; i-- {
		if wanted[m.order[i]] {
			list = append(list, m.order[i])
		}
	}
	return list
}
