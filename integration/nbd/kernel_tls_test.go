package nbd

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

// kernelClientOverTLS has the kernel's client use a disk whose server wants certificates. Debian's
// nbd-client speaks TLS 1.2, and nothing newer.
func kernelClientOverTLS(t *testing.T, g *rig.KernelGuest) {
	dir, port := t.TempDir(), rig.FreePort(t)
	ca, key := filepath.Join(dir, "server.crt"), filepath.Join(dir, "server.key")
	rig.MakeCertificate(t, ca, key)
	cert, own := rig.MakeClientCertificate(t, dir, "kernel.example")
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 64<<20),
		Args: []string{"--nbd=127.0.0.1:" + port,
			"--nbd-tls-cert=" + ca, "--nbd-tls-key=" + key, "--nbd-client-ca=" + ca}})

	files := ""
	for name, path := range map[string]string{"ca": ca, "cert": cert, "key": own} {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		files += "cat >/tmp/" + name + " <<'PEM'\n" + string(text) + "PEM\n"
	}
	const client = "nbd-client -N disk.raw --cacertfile /tmp/ca --tlshostname 127.0.0.1 "
	at := " 10.0.2.2 " + port
	g.Refused(t, files+client+"--enable-tls"+at+" /dev/nbd4") // it shows no certificate
	g.Refused(t, "nbd-client -N disk.raw"+at+" /dev/nbd4")
	const shown = client + "--enable-tls --certfile /tmp/cert --keyfile /tmp/key"
	g.OK(t, shown+at+` /dev/nbd5
dd if=/tmp/want of=/dev/nbd5 bs=65536 seek=512 conv=fsync 2>/dev/null
nbd-client -d /dev/nbd5
`+shown+at+` /dev/nbd6
dd if=/dev/nbd6 of=/tmp/got bs=65536 skip=512 count=128 2>/dev/null
cmp /tmp/want /tmp/got`)
	sessions := d.Status().Sessions
	require.NotEmpty(t, sessions)
	require.Contains(t, sessions[0].Initiator, "cert:kernel.example")
	g.OK(t, "nbd-client -d /dev/nbd6")
	d.Stop()
}
