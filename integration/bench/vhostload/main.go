// Command vhostload loads back ends of vhost-user-blk as guests would, and prints how fast they
// are: operations a second, the mean and the 99th percentile of latency, how often the guest kicked
// and slept for an operation, and the processor time of the guest and of the servers.
//
//	vhostload -mode randread -bytes 4096 -depth 32 -queues 4 -seconds 2 -pids 123 SOCKET...
//
// Each socket gets a guest of its own. All run at once, and count together.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"kubevirt.io/disk/integration/bench/guests"
)

func main() {
	err := run(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "vhostload:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	flags := flag.NewFlagSet("vhostload", flag.ContinueOnError)
	mode := flags.String("mode", "randread", "randread, randwrite, read or write")
	var l guests.Load
	flags.IntVar(&l.Bytes, "bytes", 4096, "of one request")
	flags.IntVar(&l.Depth, "depth", 1, "requests in flight, in each queue")
	flags.IntVar(&l.Queues, "queues", 1, "of each guest")
	flags.Int64Var(&l.Span, "span", 0, "bytes of the disk to use, from its beginning; 0: all")
	flags.BoolVar(&l.Indirect, "indirect", false, "indirect descriptors, as Linux has them")
	length := flags.Float64("seconds", 2, "how long")
	processes := flags.String("pids", "", "servers, whose processor time counts: 1,2")
	if err := flags.Parse(args); err != nil {
		return err
	}
	switch *mode {
	case "randread", "randwrite", "read", "write":
		l.Write = strings.HasSuffix(*mode, "write")
		l.Sequential = !strings.HasPrefix(*mode, "rand")
	default:
		return fmt.Errorf("-mode %s: not one of randread, randwrite, read, write", *mode)
	}
	if flags.NArg() == 0 {
		return errors.New("no socket: name those to load")
	}
	var pids []int
	for _, text := range strings.FieldsFunc(*processes, func(r rune) bool { return r == ',' }) {
		pid, err := strconv.Atoi(text)
		if err != nil {
			return fmt.Errorf("-pids: %w", err)
		}
		pids = append(pids, pid)
	}
	r, err := guests.Run(flags.Args(), l, time.Duration(*length*float64(time.Second)), pids)
	if err != nil {
		return err
	}
	fmt.Printf("%s, %d bytes, depth %d, %d queues, %d guests: %v\n", *mode, l.Bytes, l.Depth,
		l.Queues, flags.NArg(), r)
	if flags.NArg() > 1 {
		fmt.Println("operations of each guest:", r.Guests)
	}
	return nil
}
