package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
)

// listenAll binds all portals, or none.
func listenAll(ctx context.Context, portals []Address, n names) ([]net.Listener, error) {
	var all []net.Listener
	for _, p := range portals {
		l, err := listen(ctx, p, portals)
		if err != nil {
			closeAll(all)
			return nil, n.explainListen(err, "portal", p, SettingPortals, SettingPort)
		}
		all = append(all, l)
	}
	return all, nil
}

// listen binds one of several addresses.
func listen(ctx context.Context, a Address, all []Address) (net.Listener, error) {
	var lc net.ListenConfig
	return lc.Listen(ctx, a.Network(all), a.String())
}

func closeAll(listeners []net.Listener) {
	for _, l := range listeners {
		// An error means that the target has closed the listener already.
		_ = l.Close()
	}
}

// explainListen says what to do about common errors of binding a port.
func (n names) explainListen(err error, what string, a Address, s Setting, more ...Setting) error {
	one := n.of(s).String()
	all := one
	for _, m := range more {
		all += " or " + n.of(m).String()
	}
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%s %s: the port is taken by another process, which may be in another "+
			"container of the pod: stop it, or choose another port with %s: %w", what, a, all, err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf(
			"%s %s: this machine does not have the address: choose another with %s: %w",
			what, a, one, err)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("%s %s: not allowed to bind the port: choose one above 1023 with %s: %w",
			what, a, all, err)
	}
	return fmt.Errorf("%s %s: %w", what, a, err)
}
