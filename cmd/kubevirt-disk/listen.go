package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
)

// listenAll binds every portal, or none.
func listenAll(ctx context.Context, portals []portal) ([]net.Listener, error) {
	var all []net.Listener
	for _, p := range portals {
		l, err := listen(ctx, p.network(portals), p)
		if err != nil {
			closeAll(all)
			return nil, explainListen(err, "portal", p, keyListen, keyPort)
		}
		all = append(all, l)
	}
	return all, nil
}

func listen(ctx context.Context, network string, p portal) (net.Listener, error) {
	var lc net.ListenConfig
	return lc.Listen(ctx, network, p.String())
}

func closeAll(listeners []net.Listener) {
	for _, l := range listeners {
		// A listener that the target has closed already says so; there is nothing to lose.
		_ = l.Close()
	}
}

// explainListen says what to do about the errors that people meet.
func explainListen(err error, what string, p portal, key string, more ...string) error {
	one := nameOf(key)
	all := one
	for _, m := range more {
		all += " or " + nameOf(m)
	}
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%s %s: the port is taken by another process, which may be in another container of the pod: stop it, or choose another port with %s: %w", what, p, all, err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("%s %s: this machine does not have the address: choose another with %s: %w", what, p, one, err)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("%s %s: not allowed to bind the port: choose one above 1023 with %s: %w", what, p, all, err)
	}
	return fmt.Errorf("%s %s: %w", what, p, err)
}
