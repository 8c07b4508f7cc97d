package control

import (
	"context"
	"net"
	"net/http"
	"os"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/status"
)

type peerKey struct{}

// withPeer stores the process at the other end of a connection in the context.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	if peer := socket.Peer(c); peer != nil {
		return context.WithValue(ctx, peerKey{}, peer)
	}
	return ctx
}

// authorized lets only the daemon's own user and root pass.
func authorized(
	handle func(w http.ResponseWriter, r *http.Request, user uint32),
) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		peer, ok := r.Context().Value(peerKey{}).(*unix.Ucred)
		if !ok || peer.Uid != 0 && int(peer.Uid) != os.Geteuid() {
			answer(w, http.StatusForbidden,
				status.Refusal{Error: "only the user of the daemon and root may do that"})
			return
		}
		handle(w, r, peer.Uid)
	}
}
