package integration

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// kernelClientOverTLS has the kernel's client use a disk whose server wants certificates. Debian's
// nbd-client itself speaks TLS 1.2 only, which the server refuses. A daemon beside the client hands
// the disk on and speaks TLS 1.3 for it.
func (g *kernelGuest) kernelClientOverTLS(t *testing.T) {
	dir, port := t.TempDir(), freePort(t)
	ca, key := filepath.Join(dir, "server.crt"), filepath.Join(dir, "server.key")
	makeCertificate(t, ca, key)
	cert, own := makeClientCertificate(t, dir, "kernel.example")
	d := start(t, config{diskDir: diskDir(t, 64<<20), args: []string{"--nbd=127.0.0.1:" + port,
		"--nbd-tls-cert=" + ca, "--nbd-tls-key=" + key, "--nbd-client-ca=" + ca}})

	files := ""
	for name, path := range map[string]string{"ca": ca, "cert": cert, "key": own} {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		files += "cat >/tmp/" + name + " <<'PEM'\n" + string(text) + "PEM\n"
	}
	g.refused(t, files+"nbd-client -N disk.raw --enable-tls --certfile /tmp/cert "+
		"--keyfile /tmp/key --cacertfile /tmp/ca --tlshostname 127.0.0.1 10.0.2.2 "+port+
		" /dev/nbd4")
	d.untilSaid("TLS: tls: client offered only unsupported versions: [303")

	beside := freePort(t)
	relay := start(t, config{diskDir: filepath.Join(dir, "none"), args: []string{
		"--disk=nbds://127.0.0.1:" + port + "/disk.raw", "--disk-tls-cert=" + cert,
		"--disk-tls-key=" + own, "--disk-server-ca=" + ca, "--nbd=127.0.0.1:" + beside}})
	g.ok(t, `nbd-client -N disk.raw 10.0.2.2 `+beside+` /dev/nbd5
dd if=/tmp/want of=/dev/nbd5 bs=65536 seek=512 conv=fsync 2>/dev/null
nbd-client -d /dev/nbd5
nbd-client -N disk.raw 10.0.2.2 `+beside+` /dev/nbd6
dd if=/dev/nbd6 of=/tmp/got bs=65536 skip=512 count=128 2>/dev/null
cmp /tmp/want /tmp/got
nbd-client -d /dev/nbd6`)
	sessions := d.status().Sessions
	require.NotEmpty(t, sessions)
	require.Contains(t, sessions[0].Initiator, "cert:kernel.example")
	require.GreaterOrEqual(t, d.nbdBytes(), uint64(8<<20))
	relay.stop()
	d.stop()
}
