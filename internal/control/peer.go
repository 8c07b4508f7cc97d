package control

import (
	"context"
	"net"
	"net/http"
	"os"

	"golang.org/x/sys/unix"
)

type peerKey struct{}

// withPeer stores the process at the other end of a connection in the context.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	if peer := peerOf(c); peer != nil {
		return context.WithValue(ctx, peerKey{}, peer)
	}
	return ctx
}

// peerOf returns the process at the other end of a Unix socket, or nil if the kernel does not know
// it. A process that is not visible in this container has PID 0.
func peerOf(c net.Conn) (peer *unix.Ucred) {
	socket, ok := c.(*net.UnixConn)
	if !ok {
		return nil
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return nil
	}
	_ = raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err == nil {
			peer = cred
		}
	})
	return peer
}

// authorized lets only the daemon's own user and root pass.
func authorized(
	handle func(w http.ResponseWriter, r *http.Request, user uint32),
) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		peer, ok := r.Context().Value(peerKey{}).(*unix.Ucred)
		if !ok || peer.Uid != 0 && int(peer.Uid) != os.Geteuid() {
			answer(w, http.StatusForbidden,
				refusal{"only the user of the daemon and root may do that"})
			return
		}
		handle(w, r, peer.Uid)
	}
}
