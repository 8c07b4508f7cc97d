package libvirt

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestHandlersPageCompiles compiles the Go code of the page.
func TestHandlersPageCompiles(t *testing.T) {
	page := testtool.Must(os.ReadFile("../docs/handlers.md"))(t)
	source := `package main

import (
	"context"

	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/client"
	"libvirt.org/go/libvirtxml"
)

var (
	ctx                                     context.Context
	nodeName, vmUID, podIP, user, token, ca string
	domain                                  = libvirtxml.Domain{Devices: &libvirtxml.DomainDeviceList{}}
)

func main() {}
`
	code := goCode(string(page))
	require.Len(t, code, 2, "how to use the library, and the client")
	for _, block := range code {
		source += "\nfunc _() {\n" + block + "}\n"
	}
	file := filepath.Join(t.TempDir(), "main.go")
	require.NoError(t, os.WriteFile(file, []byte(source), 0o644))
	out, _ := exec.Command("go", "build", "-o", os.DevNull, file).CombinedOutput()
	for line := range strings.Lines(string(out)) {
		require.True(t, strings.HasPrefix(line, "#") ||
			strings.Contains(line, "declared and not used"), "%s", out)
	}
}

// TestHandlersPageImports runs the page's commands for importing the module, in a handler's module.
// It needs no network: everything else is in the module cache of this machine.
func TestHandlersPageImports(t *testing.T) {
	page := testtool.Must(os.ReadFile("../docs/handlers.md"))(t)
	root := testtool.Must(filepath.Abs(".."))(t)
	cache := testtool.Must(exec.Command("go", "env", "GOMODCACHE").Output())(t)
	var recipes []string
	for _, block := range blocks(string(page)) {
		if strings.Contains(block, "go mod edit -require") || strings.Contains(block, "go get ") {
			recipes = append(recipes, block)
		}
	}
	require.Len(t, recipes, 2, "a checkout, and a proxy")
	for _, recipe := range recipes {
		if _, err := os.Stat(filepath.Join(root, ".git")); err != nil && strings.Contains(recipe,
			"git ") {
			t.Skip("these sources are not in a git repository")
		}
		place := t.TempDir()
		require.NoError(t, os.Symlink(root, filepath.Join(place, "kubevirt-disk")))
		handler := filepath.Join(place, "handler")
		require.NoError(t, os.Mkdir(handler, 0o755))
		for name, text := range map[string]string{
			"go.mod": "module example.com/handler\n\ngo 1.26\n", "main.go": handlerSource} {
			require.NoError(t, os.WriteFile(filepath.Join(handler, name), []byte(text), 0o644))
		}
		cmd := exec.Command("bash", "-euc", recipe+"\ngo run .")
		cmd.Dir = handler
		cmd.Env = append(os.Environ(), "GOENV="+place+"/env", "GOWORK=off", "GOFLAGS=-modcacherw",
			"GOSUMDB=off", "PROXY="+place+"/proxy")
		downloaded := "file://" + strings.TrimSpace(string(cache)) + "/cache/download"
		if strings.Contains(recipe, "GOPROXY") {
			// With its own module cache, so that the module comes from the proxy. The proxy is set
			// in the file, which the recipe changes.
			cmd.Env = append(cmd.Env, "GOPROXY=", "GOMODCACHE="+place+"/cache")
			require.NoError(t, os.WriteFile(place+"/env", []byte("GOPROXY="+downloaded+"\n"),
				0o644))
		} else {
			cmd.Env = append(cmd.Env, "GOPROXY="+downloaded)
		}
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s\n%s", recipe, out)
		require.Contains(t, string(out), "LUN.Number: 0 is not a disk")
	}
}

const handlerSource = `package main

import (
	"fmt"

	"kubevirt.io/disk/libvirt"
)

func main() {
	_, err := libvirt.Disk(libvirt.LUN{Portals: []libvirt.Portal{{Host: "10.0.0.5"}}}, libvirt.Device{})
	fmt.Println(err)
}
`

// goCode returns the blocks of a page that are Go code.
func goCode(page string) []string {
	return slices.DeleteFunc(blocks(page),
		func(block string) bool { return !strings.Contains(block, "err := ") })
}

// blocks returns the indented blocks of a page.
func blocks(page string) (all []string) {
	block := ""
	for line := range strings.Lines(page + "\n.\n") {
		switch code, ok := strings.CutPrefix(line, "    "); {
		case ok:
			block += code
		case strings.TrimSpace(line) != "" && block != "":
			all = append(all, block)
			block = ""
		}
	}
	return all
}
