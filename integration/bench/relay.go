package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool/certtest"
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

// secureServers are our server as a client reaches it by TLS with a certificate, and a relay that
// does so in place of its client, which has none. The certificates are put into a directory.
func (s settings) secureServers(dir string) ([]*nbdServer, error) {
	file := func(name string) string { return filepath.Join(dir, name) }
	ca, key := file("ca-cert.pem"), file("ca-key.pem") // the names are libnbd's
	if err := certtest.Authority(ca, key); err != nil {
		return nil, err
	}
	if err := errors.Join(
		certtest.Sign(ca, key, file("server-cert.pem"), file("server-key.pem")),
		certtest.Sign(ca, key, file("client-cert.pem"), file("client-key.pem"),
			certtest.Client("client")),
	); err != nil {
		return nil, err
	}
	source := file("source.raw")
	if err := makeContent(source, nbdSize); err != nil {
		return nil, err
	}
	port, err := peers.FreePort()
	if err != nil {
		return nil, err
	}
	address := fmt.Sprintf("127.0.0.1:%d", port)
	disk := "nbds://" + address + "/disk.raw"
	server := &nbdServer{name: "TLS", binary: s.server, source: source,
		copies: disk + "?tls-certificates=" + dir,
		serve: func(n *nbdServer, images string) error {
			return n.daemon("server", images, "--nbd="+address, "--copy-mode=none",
				"--nbd-tls-cert="+file("server-cert.pem"), "--nbd-tls-key="+file("server-key.pem"),
				"--nbd-client-ca="+ca, "--access-mode=write-shared")
		}}
	relay := &nbdServer{name: "relay", export: "disk.raw", binary: s.server, source: source,
		behind: server, serve: func(n *nbdServer, _ string) error {
			n.copies = n.uri()
			return n.daemon("relay", "", "--nbd=unix:"+n.socket(), "--disk="+disk,
				"--disk-tls-cert="+file("client-cert.pem"),
				"--disk-tls-key="+file("client-key.pem"), "--disk-server-ca="+ca)
		}}
	return []*nbdServer{server, relay}, nil
}

// measureRelay prints how much processor time a relay adds: to that of its server, where none of
// them speaks TLS; and to that of the whole machine, where somebody has to.
func measureRelay(ctx context.Context, s settings) (err error) {
	all := s.relayServers()
	loads, err := s.measureServers(ctx, all)
	if err != nil {
		return err
	}
	printAdded("A relay by NBD, fio, one connection over a Unix socket:", loads, all)
	dir, err := os.MkdirTemp(s.cache, "relay-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if all, err = s.secureServers(dir); err != nil {
		return err
	}
	if loads, err = s.measureServers(ctx, all); err != nil {
		return err
	}
	printAdded("The same by TLS, of the client or of the relay, nbdcopy, and all that the machine "+
		"does for it:", loads, all)
	return nil
}
