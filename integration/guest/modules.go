package guest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"kubevirt.io/disk/adapter/initrd"
)

// addModules puts the chosen modules into an initramfs, with the indexes for modprobe: the
// dependencies, and the aliases that the kernel asks for.
func addModules(a *archive, m *initrd.Modules) error {
	root := "lib/modules/" + m.Release() + "/"
	var deps, aliases strings.Builder
	for _, name := range m.Order() {
		content, err := m.Content(name)
		if err != nil {
			return err
		}
		a.file(root+m.Path(name), 0o644, content)
		fmt.Fprintf(&deps, "%s:", m.Path(name))
		for _, dep := range m.Needs(name) {
			fmt.Fprintf(&deps, " %s", m.Path(dep))
		}
		deps.WriteByte('\n')
		for _, alias := range m.Aliases(name) {
			fmt.Fprintf(&aliases, "alias %s %s\n", alias, name)
		}
	}
	a.file(root+"modules.dep", 0o644, []byte(deps.String()))
	a.file(root+"modules.alias", 0o644, []byte(aliases.String()))
	a.file(root+"modules.symbols", 0o644, nil)
	// Without this list, a built-in module would seem to be missing.
	builtin, err := os.ReadFile(filepath.Join(m.Dir(), "modules.builtin"))
	if err != nil {
		return err
	}
	a.file(root+"modules.builtin", 0o644, builtin)
	return nil
}
