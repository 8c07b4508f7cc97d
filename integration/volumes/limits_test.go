package volumes

import (
	"crypto/tls"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/volume/api"
)

// TestVolumeLimits: flags limit the number of volumes and their size in total. Names that could be
// mistaken for something else are refused.
func TestVolumeLimits(t *testing.T) {
	t.Parallel()
	v := startVolumes(t, map[string]string{"VOLUMES_MAX": "2", "VOLUMES_MAX_BYTES": "3Mi"})
	v.put("one", "size: 1Mi")
	e := v.refusal(http.StatusInsufficientStorage, "PUT", "/volume/two", "size: 3Mi")
	require.Equal(t, api.CodeLimit, e.Code)
	require.Contains(t, e.Message, "--volumes-max-bytes")
	v.put("two", "size: 1Mi")
	e = v.refusal(http.StatusInsufficientStorage, "PUT", "/volume/three", "size: 512")
	require.Contains(t, e.Message, "--volumes-max")
	v.refusal(http.StatusInsufficientStorage, "PUT", "/volume/two", "size: 4Mi")
	v.json(http.StatusOK, "PUT", "/volume/two", "size: 2Mi")
	for _, name := range []string{"One", "-x", ".hidden", "a%20b", strings.Repeat("a", 129)} {
		v.refusal(http.StatusBadRequest, "PUT", "/volume/"+name, "size: 512")
	}
	require.Len(t, v.Status().LUNs, 2)
}

// TestVolumesNewCertificate: the running daemon uses a certificate that has replaced its old one.
func TestVolumesNewCertificate(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	rig.MakeCertificate(t, cert, key)
	d := rig.Start(t, rig.Config{DiskDir: t.TempDir(), Env: map[string]string{
		"VOLUMES_LISTEN": "127.0.0.1:0", "VOLUMES_TLS_CERT": cert, "VOLUMES_TLS_KEY": key}})
	shown := func() []byte {
		c, err := tls.Dial("tcp", volumesAddress(t, d), &tls.Config{InsecureSkipVerify: true})
		require.NoError(t, err)
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0].Raw
	}
	first := shown()
	next := filepath.Join(dir, "next")
	rig.MakeCertificate(t, next+".cert", next+".key")
	require.NoError(t, os.Rename(next+".key", key))
	require.NoError(t, os.Rename(next+".cert", cert))
	require.NotEqual(t, first, shown())
}
