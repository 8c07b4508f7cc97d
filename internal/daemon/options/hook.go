package options

import (
	"cmp"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Hook makes serve a hook sidecar or a plugin of KubeVirt: it tells the launcher of a machine's pod
// to use the disks.
type Hook struct {
	// Dir is the directory that is shared with the launcher, which takes every file in it for the
	// socket of a hook. LauncherDir is its path in the launcher.
	Dir, LauncherDir string
	Container        string // its name in annotations; "": none
	Plugin           bool   // the launcher knows the socket's name, and looks for no other

	// Volumes are the directories that may be the claim's, while it is unknown which one is. Then
	// nothing can be opened before the launcher's first call.
	Volumes []string
	// ClaimFound says that Options.PersistentDir was found, and not named by a person: the
	// launcher's machine has to agree.
	ClaimFound bool
	// MemoryLimit is how many bytes of memory the container may use.
	MemoryLimit int64
}

const (
	// hookDir is the directory below Hook.Dir for everything but the hook's socket.
	hookDir   = "disk"
	nbdSocket = "nbd.sock"
	vhostDir  = "vhost-user"
	// pluginSocket is the name in the object of kind Plugin.
	pluginSocket = "hook.sock"
)

// NBD is the portal for QEMU.
func (h *Hook) NBD() NBDPortal {
	return NBDPortal{Socket: filepath.Join(h.Dir, hookDir, nbdSocket)}
}

// LauncherNBD is the path of that socket for QEMU.
func (h *Hook) LauncherNBD() string { return filepath.Join(h.LauncherDir, hookDir, nbdSocket) }

// VhostUser is the directory of the sockets for vhost-user.
func (h *Hook) VhostUser() string { return filepath.Join(h.Dir, hookDir, vhostDir) }

// LauncherVhostUser is the path of that directory for QEMU.
func (h *Hook) LauncherVhostUser() string { return filepath.Join(h.LauncherDir, hookDir, vhostDir) }

// hookPort is IANA's port of NBD.
const hookPort = 10809

// Address is the portal for QEMU if KubeVirt has dropped the socket from the domain: one of the
// pod's own addresses, the same in every pod of a machine, and another for each hook sidecar. It is
// not 127.0.0.1, because KubeVirt sends traffic for it to the guest (masquerade). A plugin, whose
// answer is defined unchanged, has none: ok is false.
func (h *Hook) Address() (a Address, ok bool) {
	number, found := strings.CutPrefix(h.Container, "hook-sidecar-")
	n, err := strconv.ParseUint(number, 10, 8)
	if h.Plugin || !found || err != nil || n == 255 {
		return Address{}, false
	}
	return Address{netip.AddrFrom4([4]byte{127, 107, 0, byte(n + 1)}), hookPort}, true
}

// Beside are the sockets of NBD, and those that a hook has beside its directory for vhost-user: a
// container that a person has added to the pod may serve only the latter.
func (o *Options) Beside() (all []NBDPortal) {
	for _, p := range o.NBD {
		if p.Socket != "" {
			all = append(all, p)
		}
	}
	if o.VhostUserDir != "" {
		p := NBDPortal{Socket: filepath.Join(filepath.Dir(o.VhostUserDir), nbdSocket)}
		if !slices.Contains(all, p) {
			all = append(all, p)
		}
	}
	return all
}

// Sockets are the path of the hook's socket, and a path that the launcher does not take for a
// hook's. The launcher counts the sockets of all sidecars by their names, so each container has its
// own.
func (h *Hook) Sockets() (path, aside string) {
	name := cmp.Or(h.Container, "disk") + ".sock"
	if h.Plugin {
		name = pluginSocket
	}
	return filepath.Join(h.Dir, name), filepath.Join(h.Dir, hookDir, name)
}

// Claim is the file with the place of this container's claim in the machine, "" without one. It is
// for a container that is restarted, and ends with the pod.
func (h *Hook) Claim() string { return filepath.Join(resolved(h.Dir), hookDir, "claim") }

// resolved is a path whose directory has no links, unlike /var/run.
func resolved(path string) string {
	if real, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil {
		return filepath.Join(real, filepath.Base(path))
	}
	return path
}

// WorkDir is a work directory in storage that ends with the pod.
func (h *Hook) WorkDir() string { return filepath.Join(h.Dir, hookDir, "work") }
