package options

import (
	"cmp"
	"path/filepath"
)

// Hook makes serve a hook sidecar or a plugin of KubeVirt: it tells the launcher of a machine's pod
// to use the disks.
type Hook struct {
	// Dir is the directory that is shared with the launcher, who takes every file in it for the
	// socket of a hook. LauncherDir is where the launcher sees it.
	Dir, LauncherDir string
	Container        string // its name in annotations; "": none
	Plugin           bool   // the launcher knows the name of the socket, and looks for no other
}

const (
	// hookDir is the directory below Hook.Dir for all that is not a hook's socket.
	hookDir   = "disk"
	nbdSocket = "nbd.sock"
	// pluginSocket is what the object of kind Plugin has to name.
	pluginSocket = "hook.sock"
)

// NBD is where QEMU connects.
func (h *Hook) NBD() NBDPortal {
	return NBDPortal{Socket: filepath.Join(h.Dir, hookDir, nbdSocket)}
}

// LauncherNBD is the path of that socket for QEMU.
func (h *Hook) LauncherNBD() string { return filepath.Join(h.LauncherDir, hookDir, nbdSocket) }

// Sockets are the path of the hook's socket, and one that the launcher does not take for a hook's.
// The launcher counts sockets of all sidecars by their names, so each container has its own.
func (h *Hook) Sockets() (path, aside string) {
	name := cmp.Or(h.Container, "disk") + ".sock"
	if h.Plugin {
		name = pluginSocket
	}
	return filepath.Join(h.Dir, name), filepath.Join(h.Dir, hookDir, name)
}

// WorkDir is a work directory in storage that ends with the pod.
func (h *Hook) WorkDir() string { return filepath.Join(h.Dir, hookDir, "work") }
