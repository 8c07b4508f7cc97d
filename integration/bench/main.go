// Command bench measures kubevirt-disk against its peers on this machine and prints tables for
// integration/evidence/benchmarks.md, which describes the method. It compares SCSI load with tgtd
// and gotgt, by common clients and by its own load generator, expanding and serving images with
// qemu-img convert, disks by NBD with nbdkit and qemu-nbd, and disks by vhost-user with
// qemu-storage-daemon. All candidates take turns within a round, so that other work on the machine
// affects all of them. Each round begins with another candidate, because one may leave the machine
// warmer for the next. The tables show medians over the rounds.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// settings are the command's flags.
type settings struct {
	server string        // path of kubevirt-disk
	before string        // path of an earlier kubevirt-disk; "": none
	gotgt  string        // path of gotgt
	cache  string        // directory of images and raw files
	rounds int           // how often each measurement is repeated
	length time.Duration // of one measurement of SCSI load or cold reads
	only   []string      // some of parts
	folio  int           // KiB
	vhost  string        // a server by vhost-user that runs, in place of server; "": none
	// which loads of "scsi" and "load" and which copies of "hydrate" to measure
	loads   *regexp.Regexp
	targets []string // "kubevirt-disk", "tgtd", "gotgt", "floor", beforeName
}

// parts are the names of the measurements.
var parts = []string{"scsi", "load", "expand", "compress", "hydrate", "start", "cold", "replicas",
	"registry", "upload", "nbd", "relay", "history", "vhost"}

func main() {
	s, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err = run(ctx, s)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func parse(args []string) (settings, error) {
	var s settings
	var only, targets, loads string
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.StringVar(&s.server, "server", "bin/kubevirt-disk", "the kubevirt-disk to measure")
	flags.StringVar(&s.before, "before", "",
		"an earlier kubevirt-disk, which takes part in every measurement")
	flags.StringVar(&s.gotgt, "gotgt", "cache/gotgt/gotgt",
		"the gotgt that scripts/build-gotgt.sh built")
	flags.StringVar(&s.cache, "cache", "cache/bench",
		"directory for images and raw files; takes 10 GiB and is kept")
	flags.IntVar(&s.folio, "folio", 32, "size of the page cache's folios that hold the raw "+
		"files of SCSI load, KiB, a power of 2; on real systems read-ahead (128 by default) "+
		"or the tool that unpacked an image (4 to 16) decides")
	flags.IntVar(&s.rounds, "rounds", 5, "how often each measurement is repeated")
	flags.DurationVar(&s.length, "length", 2*time.Second,
		"of one measurement of SCSI load or of cold reads (iscsi-perf counts in seconds)")
	flags.StringVar(&only, "only", strings.Join(parts, ","),
		"what to measure: common clients, our own load generator, the expansion of images, "+
			"their compression, disks that copy their image, the time to the first read, reads "+
			"of an image that is not copied, many disks of one image, images in a registry, "+
			"uploads into volumes, disks by NBD, what a relay adds, snapshots and "+
			"commits, disks by vhost-user")
	flags.StringVar(&s.vhost, "vhost", "",
		"for \"vhost\": sockets and process of a server that runs, SOCKET[,SOCKET...],PID, in "+
			"place of -server")
	flags.StringVar(&loads, "loads", "",
		"a regular expression; measures only loads (and copies: \"zlib, convert\", \"zstd, "+
			"compress\", \"zlib, persistent clone\", \"registry, boot\", "+
			"\"upload, raw\") whose names match")
	flags.StringVar(&targets, "targets", "kubevirt-disk,tgtd,gotgt,floor",
		"the targets to measure; the second is the baseline of the first, and floor is a "+
			"bare loop of system calls in C")
	if err := flags.Parse(args); err != nil {
		return s, err
	}
	s.only, s.targets = strings.Split(only, ","), strings.Split(targets, ",")
	switch {
	case flags.NArg() > 0:
		return s, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case s.folio < 4 || s.folio > 2048 || s.folio&(s.folio-1) != 0:
		return s, fmt.Errorf("-folio is %d, but must be a power of 2 from 4 to 2048", s.folio)
	case s.rounds < 1:
		return s, fmt.Errorf("-rounds is %d, but must be at least 1", s.rounds)
	case s.length < time.Second:
		return s, fmt.Errorf("-length is %v, but iscsi-perf needs at least a second", s.length)
	}
	for _, what := range s.only {
		if !slices.Contains(parts, what) {
			return s, fmt.Errorf("-only: %q is not one of %s", what, strings.Join(parts, ", "))
		}
	}
	var err error
	if s.loads, err = regexp.Compile(loads); err != nil {
		return s, fmt.Errorf("-loads: %w", err)
	}
	for _, name := range s.targets {
		if !slices.Contains([]string{"kubevirt-disk", "tgtd", "gotgt", floorName}, name) {
			return s, fmt.Errorf("-targets: %q is not one of kubevirt-disk, tgtd, gotgt and %s",
				name, floorName)
		}
	}
	paths := []*string{&s.server, &s.gotgt, &s.cache}
	if s.before != "" {
		paths = append(paths, &s.before)
		s.targets = append(s.targets, beforeName)
	}
	for _, path := range paths {
		absolute, err := filepath.Abs(*path)
		if err != nil {
			return s, err
		}
		*path = absolute
	}
	return s, nil
}

// earlier returns the settings for the earlier build, if there is one.
func (s settings) earlier() (earlier settings, ok bool) {
	earlier = s
	earlier.server, earlier.before = s.before, ""
	return earlier, s.before != ""
}

// chosen returns the jobs to measure.
func (s settings) chosen(jobs []job) []job {
	return slices.DeleteFunc(jobs, func(j job) bool { return !s.loads.MatchString(j.name) })
}

func run(ctx context.Context, s settings) error {
	for _, tool := range []string{"iscsi-perf", "qemu-img"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%w (scripts/install-tools.sh installs it)", err)
		}
	}
	if err := os.MkdirAll(s.cache, 0o755); err != nil {
		return err
	}
	if slices.Contains(s.only, "scsi") {
		const title = "One session, iscsi-perf for reads and qemu-img bench for writes:"
		if err := measureSCSI(ctx, s, title, s.chosen(clientJobs()), 1, lunSize); err != nil {
			return err
		}
	}
	if slices.Contains(s.only, "load") {
		const one, many = "The load generator, one LUN:", "The load generator, many LUNs:"
		if err := measureSCSI(ctx, s, one, s.chosen(generatorJobs(generatorLoads(1, lunSize))), 1,
			lunSize); err != nil {
			return err
		}
		if err := measureSCSI(ctx, s, many,
			s.chosen(generatorJobs(generatorLoads(manyLUNs, lunSize/manyLUNs))), manyLUNs,
			lunSize/manyLUNs); err != nil {
			return err
		}
	}
	for _, part := range []struct {
		name    string
		measure func(context.Context, settings) error
	}{{"expand", measureExpansion}, {"compress", measureCompression},
		{"hydrate", measureHydration}, {"start", measureStart},
		{"cold", measureColdReads}, {"replicas", measureReplicas}, {"registry", measureRegistry},
		{"upload", measureUpload}, {"nbd", measureNBD},
		{"relay", measureRelay}, {"history", measureHistory}, {"vhost", measureVhost}} {
		if slices.Contains(s.only, part.name) {
			if err := part.measure(ctx, s); err != nil {
				return err
			}
		}
	}
	return nil
}
