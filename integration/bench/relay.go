package main

import (
	"context"
	"fmt"
	"net/url"
	"os"
)

// relayServers are our server, and the same behind what hands its disk on: a relay, and socat,
// which only copies bytes.
func (s settings) relayServers() []*nbdServer {
	server := &nbdServer{name: "kubevirt-disk", export: "disk.raw", binary: s.server}
	relay := func(name, binary string) *nbdServer {
		return &nbdServer{name: name, export: "disk.raw", behind: server, binary: binary,
			handOn: func(n *nbdServer) error {
				return n.daemon("relay", "", "--nbd=unix:"+n.socket(),
					"--disk=nbd+unix:///disk.raw?socket="+url.QueryEscape(server.socket()))
			}}
	}
	socat := &nbdServer{name: "socat", export: "disk.raw", behind: server,
		handOn: func(n *nbdServer) error {
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
	out := table{head: []string{"load", "per second", "CPU"}}
	for _, other := range all[1:] {
		out.head = append(out.head, "with "+other.name, "CPU", "times the CPU")
	}
	for _, l := range loads {
		row := []string{l.name, fmt.Sprintf("%.0f", median(all[0].rates[l.name])),
			microseconds(all[0].cpu[l.name])}
		for _, other := range all[1:] {
			var ratios []float64
			for round, cpu := range other.cpu[l.name] {
				ratios = append(ratios, cpu/all[0].cpu[l.name][round])
			}
			row = append(row, fmt.Sprintf("%.0f", median(other.rates[l.name])),
				microseconds(other.cpu[l.name]), ratio(median(ratios), 1))
		}
		out.add(row...)
	}
	fmt.Println("A relay by NBD, fio, one connection over a Unix socket:")
	out.print(os.Stdout)
	return nil
}
