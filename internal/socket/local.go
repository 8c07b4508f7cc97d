package socket

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
)

// LocalUser returns the user who has made the other end of a connection by TCP and IPv4, as the
// kernel has it. It is an error if that end is not in this network namespace: the peer is
// elsewhere, or its packets only pass here, as those of a virtual machine do.
func LocalUser(c net.Conn) (uid uint32, err error) {
	ours, isTCP := c.LocalAddr().(*net.TCPAddr)
	theirs, _ := c.RemoteAddr().(*net.TCPAddr)
	if !isTCP || ours.IP.To4() == nil || theirs.IP.To4() == nil {
		return 0, fmt.Errorf("%s is not connected by TCP and IPv4", c.RemoteAddr())
	}
	// It has all sockets of TCP by IPv4 in this network namespace: proc(5).
	table, err := os.ReadFile("/proc/self/net/tcp")
	if err != nil {
		return 0, err
	}
	// Their socket is named from their side: its own address is first.
	ends := entry(theirs) + " " + entry(ours) + " "
	for line := range strings.Lines(string(table)) {
		_, socket, _ := strings.Cut(line, ": ")
		rest, found := strings.CutPrefix(socket, ends)
		if !found {
			continue
		}
		// A socket whose process has closed it has no user, and the table says 0.
		const state, user, established = 0, 4, "01"
		if f := strings.Fields(rest); len(f) > user && f[state] == established {
			n, err := strconv.ParseUint(f[user], 10, 32)
			return uint32(n), err
		}
	}
	return 0, errors.New("no process of this network namespace has the other end")
}

// entry is an address as the table has it: the four bytes as one number of this machine.
func entry(a *net.TCPAddr) string {
	return fmt.Sprintf("%08X:%04X", binary.NativeEndian.Uint32(a.IP.To4()), a.Port)
}
