package volumes

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
)

// volumeDaemon is a daemon that makes volumes.
type volumeDaemon struct {
	*rig.Daemon
	base string // http://ADDRESS
	env  map[string]string
	dir  string // of its images; it may be empty
	home string
}

// startVolumes starts a daemon that makes volumes on loopback, with an empty directory of images.
func startVolumes(t *testing.T, env map[string]string) *volumeDaemon {
	t.Helper()
	v := &volumeDaemon{env: env, dir: t.TempDir(), home: t.TempDir()}
	if dir := env["DISK_DIR"]; dir != "" {
		v.dir = dir
	}
	v.restart(t)
	return v
}

// restart starts the daemon again with its old directories.
func (v *volumeDaemon) restart(t *testing.T) {
	t.Helper()
	env := map[string]string{"VOLUMES_LISTEN": "127.0.0.1:0"}
	maps.Copy(env, v.env)
	v.Daemon = rig.Start(t, rig.Config{DiskDir: v.dir, StateDir: v.home, Env: env})
	v.base = "http://" + volumesAddress(t, v.Daemon)
}

// volumesAddress is the address of the volumes, from the log.
func volumesAddress(t *testing.T, d *rig.Daemon) (address string) {
	t.Helper()
	for _, entry := range d.Log() {
		if entry["msg"] == "volumes" {
			address, _ = entry["address"].(string)
		}
	}
	require.NotEmpty(t, address)
	return address
}

// ask makes a request and returns the status and the body.
func (v *volumeDaemon) ask(method, path, body string, headers ...string) (int, string) {
	v.T.Helper()
	r := testtool.Must(http.NewRequestWithContext(v.T.Context(), method, v.base+path,
		strings.NewReader(body)))(v.T)
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	client := http.Client{Timeout: rig.Timeout}
	answer := testtool.Must(client.Do(r))(v.T)
	defer answer.Body.Close()
	return answer.StatusCode, string(testtool.Must(io.ReadAll(answer.Body))(v.T))
}

// answers returns the status of the answer to a request.
func (v *volumeDaemon) answers(method, path string) int {
	v.T.Helper()
	status, _ := v.ask(method, path, "")
	return status
}

// json makes a request and decodes the answer, which must have this status.
func (v *volumeDaemon) json(want int, method, path, body string) (a api.Volume) {
	v.T.Helper()
	status, text := v.ask(method, path, body, "Accept", "application/json")
	require.Equal(v.T, want, status, text)
	if text != "" {
		require.NoError(v.T, json.Unmarshal([]byte(text), &a), text)
	}
	return a
}

// refusal makes a request that must be refused with this status.
func (v *volumeDaemon) refusal(want int, method, path, body string) (e api.Error) {
	v.T.Helper()
	status, text := v.ask(method, path, body, "Accept", "application/json")
	require.Equal(v.T, want, status, text)
	require.NoError(v.T, json.Unmarshal([]byte(text), &e), text)
	require.NotEmpty(v.T, e.Message)
	return e
}

// put makes a volume.
func (v *volumeDaemon) put(name, spec string) api.Volume {
	v.T.Helper()
	return v.json(http.StatusCreated, "PUT", strings.TrimSuffix("/volume/"+name, "/"), spec)
}

// number is a LUN in the form of libiscsi's addresses: the first two bytes of the LUN's address.
func number(lun uint16) int {
	if lun > 255 {
		return int(lun) | 1<<14
	}
	return int(lun)
}

// volumeURL returns the address of a volume's LUN from an answer.
func volumeURL(a api.Volume) string {
	return fmt.Sprintf("iscsi://%s:%s/%s/%d", a.ISCSI.Host.Name, a.ISCSI.Host.Port, a.ISCSI.Portal,
		number(a.ISCSI.LUN))
}

// atDisk runs commands of qemu-io at a disk.
func atDisk(t *testing.T, url string, commands ...string) string {
	t.Helper()
	args := []string{"-f", "raw"}
	for _, c := range commands {
		args = append(args, "-c", c)
	}
	out := rig.OK(t, "qemu-io", append(args, url)...)
	require.NotContains(t, out, "failed")
	return out
}

// files returns the files below a directory.
func files(t *testing.T, dir string) (names []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			name, _ := filepath.Rel(dir, path)
			names = append(names, name)
		}
		return err
	}))
	return names
}

// portalAddress is the first portal of a daemon.
func portalAddress(t *testing.T, d *rig.Daemon) net.Addr {
	t.Helper()
	return testtool.Must(net.ResolveTCPAddr("tcp", d.Portals[0]))(t)
}
