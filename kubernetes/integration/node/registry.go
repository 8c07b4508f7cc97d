package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// RegistryAddress is where a registry can listen, and pods reach it: at the first node.
const RegistryAddress = "10.244.0.1:5000"

// ServeRegistry serves a registry at an address of the first node until the test ends, and stores
// images there with the digests that the nodes know. Their names begin with the address. With
// secure, it has the certificate of the node's API server, which is that of quay.io and
// registry.example.com, too.
func (n *Node) ServeRegistry(t testing.TB, address string, secure bool, images ...Image) {
	t.Helper()
	dir := t.TempDir()
	tls := ""
	if secure {
		tls = fmt.Sprintf(", tls: {certificate: %s/server.crt, key: %[1]s/server.key}",
			n.certificates())
	}
	config := filepath.Join(dir, "registry.yml")
	require.NoError(t, os.WriteFile(config, fmt.Appendf(nil, `
version: 0.1
log: {level: error}
storage: {filesystem: {rootdirectory: %s/registry}}
http: {addr: "%s"%s}
`, dir, address, tls), 0o644))
	serve := n.Command(t.Context(), "docker-registry", "serve", config)
	require.NoError(t, serve.Start())
	t.Cleanup(func() {
		_ = serve.Process.Kill()
		_ = serve.Wait() // it was killed
	})
	for _, image := range images {
		archive := filepath.Join(dir, "image.tar")
		digest, err := image.write(archive)
		require.NoError(t, err)
		n.digests[image.Name] = digest
		n.until(t, "the registry has the image", func() bool {
			out, err := n.Command(t.Context(), "skopeo", "copy", "--quiet", "--preserve-digests",
				"--dest-tls-verify=false", "oci-archive:"+archive+":"+image.Name,
				"docker://"+image.Name).CombinedOutput()
			if err != nil && !strings.Contains(string(out), "connect") { // it does not listen yet
				t.Fatalf("%v\n%s", err, out)
			}
			return err == nil
		})
	}
}

func (n *Node) certificates() string { return filepath.Join(n.plane, "certs") }
