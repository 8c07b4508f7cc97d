package main

import (
	"context"
	"net/url"
)

// relayServers are our server, and the same behind what hands its disk on: a relay, and socat,
// which only copies bytes.
func (s settings) relayServers() []*nbdServer {
	server := &nbdServer{name: "kubevirt-disk", export: "disk.raw", binary: s.server}
	relay := func(name, binary string) *nbdServer {
		return &nbdServer{name: name, export: "disk.raw", behind: server, binary: binary,
			serve: func(n *nbdServer, _ string) error {
				return n.daemon("relay", "", "--nbd=unix:"+n.socket(),
					"--disk=nbd+unix:///disk.raw?socket="+url.QueryEscape(server.socket()))
			}}
	}
	socat := &nbdServer{name: "socat", export: "disk.raw", behind: server,
		serve: func(n *nbdServer, _ string) error {
			return n.run(n.socket(), []string{"socat", "-b262144",
				"UNIX-LISTEN:" + n.socket() + ",fork", "UNIX-CONNECT:" + server.socket()})
		}}
	all := []*nbdServer{server, relay("relay", s.server), socat}
	if s.before != "" {
		all = append(all, relay(beforeName, s.before))
	}
	return all
}

// measureRelay prints how much processor time a relay adds to that of its server. It speaks no TLS
// here.
func measureRelay(ctx context.Context, s settings) error {
	all := s.relayServers()
	loads, err := s.measureServers(ctx, all)
	if err != nil {
		return err
	}
	printAdded("A relay by NBD, fio, one connection over a Unix socket:", loads, all)
	return nil
}
