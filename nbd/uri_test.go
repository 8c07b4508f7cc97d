package nbd

import (
	"net"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

func TestParseURI(t *testing.T) {
	for text, want := range map[string]URI{
		"nbds://disks.example/fedora.qcow2": {Address: "disks.example:10809",
			Host: "disks.example", Export: "fedora.qcow2", TLS: true},
		"nbds://[fd00::1]:99/a/b": {Address: "[fd00::1]:99", Host: "fd00::1", Export: "a/b",
			TLS: true},
		"nbd://127.0.0.1": {Address: "127.0.0.1:10809", Host: "127.0.0.1"},
		"nbd://localhost:1/x": {Address: "localhost:1", Host: "localhost",
			Export: "x"},
		"nbd+unix:///a%20b?socket=/run/disk.sock": {Address: "unix:/run/disk.sock", Export: "a b"},
	} {
		require.Equal(t, want, testtool.Must(ParseURI(text))(t, text), text)
	}
	for text, says := range map[string]string{
		"":                            "its scheme must be nbds",
		"fedora.qcow2":                "its scheme must be nbds",
		"iscsi://host/iqn/1":          "its scheme must be nbds",
		"nbds:///x":                   "names no host",
		"nbds://host:port/x":          "no URI",
		"nbds://u:secret@host/x":      "names a user",
		"nbds://host/x?socket=/a":     "a socket goes with nbd+unix",
		"nbds://host/x?tls-psk=1":     "only nbd+unix has a parameter",
		"nbd://host/x":                "use nbds",
		"nbd+unix:///x":               "absolute path",
		"nbd+unix:///x?socket=a":      "absolute path",
		"nbd+unix://host/x?socket=/a": "absolute path",
		"nbds://host/a%00b":           "zero byte",
	} {
		_, err := ParseURI(text)
		require.ErrorContains(t, err, says, text)
		require.NotContains(t, err.Error(), "secret")
	}
}

// TestSessionHasTheNameOfItsSocket: a daemon may bind a socket by another name than people know.
func TestSessionHasTheNameOfItsSocket(t *testing.T) {
	v := serve(t, 1, nil)
	l := testtool.Must(net.Listen("unix", filepath.Join(t.TempDir(), "s")))(t)
	go func() { _ = v.Serve(l, Portal{Name: serving.SocketPrefix + "/run/disk/vm.sock"}) }()
	c := greet(t, testtool.Must(net.Dial("unix", l.Addr().String()))(t))
	c.send(u32(flagFixedNewstyle | flagNoZeroes))
	c.choose("", compact)
	require.Equal(t, "/run/disk/vm.sock", v.Sessions()[0].Local)
}
