package guestinit

import (
	"encoding/binary"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// router is a message of the kernel about a router's options.
func router(options ...byte) syscall.NetlinkMessage {
	m := syscall.NetlinkMessage{Data: make([]byte, userOption)}
	m.Header.Type = unix.RTM_NEWNDUSEROPT
	m.Data[0] = unix.AF_INET6
	binary.NativeEndian.PutUint16(m.Data[2:], uint16(len(options)))
	binary.NativeEndian.PutUint32(m.Data[4:], 2)
	m.Data = append(m.Data, options...)
	return m
}

func TestRouterOptions(t *testing.T) {
	server := net.ParseIP("fec0::3")
	options := append([]byte{optDNS, 3, 0, 0, 0, 0, 0, 9}, server...)
	options = append(options, optSearch, 2, 0, 0, 0, 0, 0, 9, 2, 'a', 'b', 0, 0, 0, 0, 0)
	dns := event{card: 2, dns: []net.IP{server}, lifetime: 9 * time.Second}
	search := event{card: 2, search: []string{"ab"}, lifetime: 9 * time.Second}
	require.Equal(t, []event{dns, search}, eventsOf(router(options...)))
	options[7], dns.lifetime = 0, 0
	require.Equal(t, []event{dns, search}, eventsOf(router(options...)))
}

func FuzzEvents(f *testing.F) {
	add := func(m syscall.NetlinkMessage) { f.Add(m.Header.Type, m.Data) }
	add(router(optDNS, 3, 0, 0, 0, 0, 0, 9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8))
	add(router(optSearch, 2, 0, 0, 0, 0, 0, 9, 2, 'a', 'b', 0, 0, 0, 0, 0))
	f.Add(uint16(unix.RTM_NEWADDR), []byte{unix.AF_INET6, 64, 0, 0, 2, 0, 0, 0, 20, 0, 1, 0})
	f.Add(uint16(unix.RTM_NEWADDR), []byte{unix.AF_INET6, 64, 0, 0, 2, 0, 0, 0, 5, 0, 1, 0, 1})
	f.Fuzz(func(t *testing.T, kind uint16, b []byte) {
		m := syscall.NetlinkMessage{Data: b}
		m.Header.Type = kind
		for _, e := range eventsOf(m) {
			require.True(t, e.address != nil || len(e.dns) > 0 || len(e.search) > 0)
			for _, name := range e.search {
				require.False(t, strings.ContainsAny(name, " \n"))
			}
		}
	})
}
