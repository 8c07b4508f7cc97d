package registry

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

// TestRegistryLogins: who has logged in with docker, podman or skopeo, wherever these keep that,
// has logged in for kubevirt-disk.
func TestRegistryLogins(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img", "podman", "skopeo", "unshare")
	raw, qcow2 := newDisk(t)
	s := rig.StartRegistry(t, false, basicAuth(t))
	flag := "--insecure-registry=" + s.Address
	path := rig.Program(t)
	const docker = "docker"
	for name, c := range map[string]struct {
		tool   []string
		env    []string // @ is a directory of the test
		target string   // behind the registry's address
		named  string   // by --registry-config
		root   bool
	}{
		"session":        {tool: []string{"podman"}, env: []string{"XDG_RUNTIME_DIR=@/run"}},
		"session skopeo": {tool: []string{"skopeo"}, env: []string{"XDG_RUNTIME_DIR=@/run"}},
		"repository": {tool: []string{"podman"}, env: []string{"XDG_RUNTIME_DIR=@/run"},
			target: "/vm"},
		"named by a variable": {tool: []string{"podman"},
			env: []string{"XDG_RUNTIME_DIR=@/run", "REGISTRY_AUTH_FILE=@/auth.json"}},
		"named by a flag": {tool: []string{"skopeo", "--authfile=@/auth.json"},
			named: "@/auth.json"},
		"a directory named by a flag": {tool: []string{"podman", "--authfile=@/auth.json"},
			target: "/vm/fedora", named: "@"},
		"home": {tool: []string{docker}},
		"docker's directory": {tool: []string{docker},
			env: []string{"DOCKER_CONFIG=@/docker"}},
		"no session": {tool: []string{"skopeo"}, root: true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			require.NoError(t, os.Mkdir(filepath.Join(dir, "run"), 0o700))
			here := strings.NewReplacer("@", dir)
			env := []string{"HOME=" + dir}
			for _, e := range c.env {
				env = append(env, here.Replace(e))
			}
			login := c.tool[0] + " login --username " + registryUser + " --password-stdin " +
				here.Replace(strings.Join(c.tool[1:], " "))
			if c.tool[0] == docker {
				if !rig.HaveTool(docker) {
					t.Skip("needs docker")
				}
			} else {
				login += " --tls-verify=false"
			}
			login = "echo " + registryPassword + " | " + login + " " + s.Address + c.target
			flags := flag
			if c.named != "" {
				flags += " --registry-config=" + here.Replace(c.named)
			}
			ref := s.Address + "/vm/fedora:42"
			script := "set -e\n" + login + "\n" +
				path + " push --base=none " + flags + " " + qcow2 + " " + ref + "\n" +
				path + " pull " + flags + " " + ref + " " + filepath.Join(dir, "a.raw") + "\n"
			command := []string{"sh", "-c", script}
			if c.root { // the directory is the same for everything on this machine
				rig.NeedRoot(t)
				command = []string{"unshare", "--mount", "sh", "-c",
					"mount -t tmpfs tmpfs /run || exit 2\n" + script}
			}
			r := rig.Client(t, env, command[0], command[1:]...)
			require.Zero(t, r.Status, "%s", r)
			rig.SameFile(t, raw, filepath.Join(dir, "a.raw"))
			require.NotContains(t, r.Output, registryPassword)
			r = rig.Client(t, []string{"HOME=/nonexistent", "XDG_RUNTIME_DIR=/nonexistent"}, path,
				"pull", flag, ref, filepath.Join(dir, "b.raw"))
			require.Equal(t, 1, r.Status, "without the login: %s", r)
		})
	}
}
