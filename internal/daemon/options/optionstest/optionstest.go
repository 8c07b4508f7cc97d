// Package optionstest has options, and an image that they can name, for the tests of the packages
// that read them.
package optionstest

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/registry/transport"
)

// Table has the settings that tests expect in messages.
func Table(o *options.Options) []options.Setting {
	return []options.Setting{
		named("disk-dir", "DISK_DIR", &o.Images.Dir),
		named("listen", "LISTEN", &o.Portals),
		named("port", "PORT", &o.Portals),
		named("metrics-listen", "METRICS_LISTEN", &o.Pages),
		named("ready-file", "READY_FILE", &o.ReadyFile),
		named("copy-mode", "COPY_MODE", &o.Settings.Disk.CopyMode),
		named("size", "SIZE", &o.Settings.Disk.Size),
		named("access-mode", "ACCESS_MODE", &o.Settings.Disk.AccessMode),
		{Key: "format", Field: &o.Settings.Disk.Format},
		{Key: "read-only", Field: &o.Settings.Disk.ReadOnly},
		{Key: "disks", Flag: `"disks" in the file`, Field: &o.Settings.Disks},
	}
}

func named(key, variable string, field any) options.Setting {
	return options.Setting{Key: key, Flag: "--" + key, Variable: variable, Field: field}
}

// Loopback returns an address with a free port of this machine.
func Loopback() options.Address {
	return options.Address{Addr: netip.AddrFrom4([4]byte{127, 0, 0, 1})}
}

// SavedImage is a container image with one layer, as docker saves it.
func SavedImage(t testing.TB) transport.Reference {
	t.Helper()
	archive := func(files ...string) []byte {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for i := 0; i < len(files); i += 2 {
			require.NoError(t, w.WriteHeader(&tar.Header{Name: files[i], Mode: 0o644,
				Size: int64(len(files[i+1]))}))
			_, err := w.Write([]byte(files[i+1]))
			require.NoError(t, err)
		}
		require.NoError(t, w.Close())
		return b.Bytes()
	}
	layer := archive("hello", "world")
	file := filepath.Join(t.TempDir(), "image.tar")
	require.NoError(t, os.WriteFile(file, archive("layer.tar", string(layer), "config.json",
		fmt.Sprintf(`{"os":"linux","architecture":"amd64","config":{"Cmd":["/hello"]},"rootfs":`+
			`{"type":"layers","diff_ids":["sha256:%x"]}}`, sha256.Sum256(layer)),
		"manifest.json", `[{"Config":"config.json","Layers":["layer.tar"]}]`), 0o644))
	ref, err := transport.ParseReference("docker-archive:" + file)
	require.NoError(t, err)
	return ref
}
