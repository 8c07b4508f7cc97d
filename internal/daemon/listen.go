package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/socket"
)

// listenAll binds all portals, or none.
func listenAll(ctx context.Context, portals []options.Address, by options.Alternatives) (
	[]net.Listener, error) {
	var all []net.Listener
	for _, p := range portals {
		l, err := listen(ctx, "portal", p, portals, by)
		if err != nil {
			closeAll(all)
			return nil, err
		}
		all = append(all, l)
	}
	return all, nil
}

// closeAll closes listeners, even if they are closed already.
func closeAll[L net.Listener](listeners []L) {
	for _, l := range listeners {
		_ = l.Close()
	}
}

// listen binds one of several addresses. The error names the settings that choose them.
func listen(ctx context.Context, what string, a options.Address, all []options.Address,
	by options.Alternatives) (net.Listener, error) {
	lc := net.ListenConfig{KeepAliveConfig: socket.KeepAlive}
	l, err := lc.Listen(ctx, a.Network(all), a.String())
	switch {
	case err == nil:
		return socket.Lasting(l), nil
	case errors.Is(err, syscall.EADDRINUSE):
		err = fmt.Errorf("%s %s: the port is taken, by another setting or by another process, "+
			"which may be in another container of the pod: stop it, or choose another port with "+
			"%s: %w", what, a, by, err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		err = fmt.Errorf("%s %s: this machine does not have the address: choose another with %s: "+
			"%w", what, a, by[0], err)
	case errors.Is(err, syscall.EACCES):
		err = fmt.Errorf("%s %s: not allowed to bind the port: choose one above 1023 with %s: %w",
			what, a, by, err)
	default:
		err = fmt.Errorf("%s %s: %w", what, a, err)
	}
	return nil, err
}
