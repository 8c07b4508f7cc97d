// Command containerdisk stands in for the program that KubeVirt mounts into the container of a
// containerDisk volume, and that runs instead of the image's entry point. It does what KubeVirt's
// is known to do. With --no-op it ends at once. With --copy-path PATH it listens on the socket
// PATH.sock; the node's agent finds the container's process by this socket. It ends when the socket
// is removed, or by SIGTERM.
package main

import (
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	noOp := flag.Bool("no-op", false, "end at once")
	copyPath := flag.String("copy-path", "", "path of the socket, without .sock")
	flag.Parse()
	if *noOp {
		return
	}
	if err := serve(*copyPath + ".sock"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// serve answers nothing: a client asks the kernel for the process at the other end.
func serve(path string) error {
	l, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	defer l.Close() // removes the socket
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	for tick := time.NewTicker(100 * time.Millisecond); ; {
		select {
		case <-stop:
			return nil
		case <-tick.C:
			if _, err := os.Stat(path); os.IsNotExist(err) {
				return nil
			}
		}
	}
}
