package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"go.uber.org/zap/zapcore"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/target"
)

// config is a complete, checked configuration of serve.
type config struct {
	diskDir, workDir string
	images           []string // served instead of the images in diskDir; empty: none were named
	streams          daemon.Streams
	containers       daemon.Containers
	volumes          *daemon.Volumes // nil: none can be made
	temporary        bool            // workDir is made at the start, and removed at the end
	portals          []daemon.Address
	behindNAT        bool
	targetName       string
	persistentDir    string // "": none
	usageTypes       daemon.UsageTypes
	onImageChange    instance.ImageChange
	leftovers        instance.Leftovers // "": by who has named the directory
	workDirNamed     bool
	ephemeralFlush   bool
	controlSocket    string // path; "": none
	recordBoot       string // file; "": none
	limits           target.Limits
	common           daemon.DiskSettings          // for every disk without its own
	disks            map[string]daemon.SingleDisk // by image
	metricsListen    *daemon.Address              // nil: off
	pagesHosts       []string                     // other names that the pages are asked for
	metricsChosen    bool                         // metricsListen is not the default
	readyFile        string                       // "": none
	log              logConfig
	chap             chap.Config
	chapFiles        bool              // a part of chap comes from files
	values           map[string]string // the text of each setting, by key
}

// loadConfig resolves every setting and reports everything that is wrong with them at once, as a
// *problems.Error. If images are named, they are served instead of the directory's.
func loadConfig(flags *pflag.FlagSet, read fileReader, images ...string) (*config, error) {
	l := loadBy(read, flags)
	c := &config{
		diskDir:        l.text(keyDiskDir),
		workDir:        l.text(keyWorkDir),
		workDirNamed:   l.source(keyWorkDir) != "",
		behindNAT:      l.bool(keyBehindNAT),
		targetName:     l.text(keyTargetName),
		readyFile:      l.text(keyReadyFile),
		metricsListen:  l.metricsListen(),
		pagesHosts:     l.list(keyPagesHost),
		metricsChosen:  l.source(keyMetricsListen) != "",
		persistentDir:  l.text(keyPersistentDir),
		ephemeralFlush: l.bool(keyEphemeralFlush),
		recordBoot:     l.text(keyRecordBoot),
		common: daemon.DiskSettings{CopyMode: l.copyMode(), CopyModeSource: l.name(keyCopyMode),
			Size: l.size(keySize)},
		volumes: l.volumes(),
		log:     l.logConfig(),
		values:  map[string]string{},
	}
	c.streams, c.containers = l.streams()
	var words []string
	named := len(c.containers.References) > 0
	if n := flags.ArgsLenAtDash(); n >= 0 && named { // as for adapt
		images, words = images[:n], images[n:]
	}
	c.containers.Machine = l.containerMachine(named, words)
	for _, s := range settings {
		c.values[s.key] = strings.Join(l.list(s.key), ",")
	}
	c.usageTypes = l.usageTypes()
	for _, key := range []string{keyEntrypoint, keyArgs} {
		c.values[key] = strings.Join(l.lines(key), "\n")
	}
	c.values[keyEnv] = strings.Join(c.containers.Machine.Env, "\n") // a file may have changed
	c.values[keyUsageType] = fmt.Sprint(c.usageTypes)               // annotations may have changed
	if err := libvirt.CheckName(c.targetName); err != nil {
		l.problems.Add(l.name(keyTargetName), "%v", err)
	}
	var err error
	if c.common.AccessMode, err = target.ParseAccessMode(l.text(keyAccessMode)); err != nil {
		l.problems.Add(l.name(keyAccessMode), "%v", err)
	}
	c.controlSocket = l.controlSocket()
	c.limits = target.Limits{Memory: l.bytes(keyMemory, parseMemory),
		MaxConnections: l.count(keyMaxSessions), MaxPerAddress: l.count(keyMaxPerAddress)}
	if c.onImageChange, err = instance.ParseImageChange(l.text(keyOnImageChange)); err != nil {
		l.problems.Add(l.name(keyOnImageChange), "%v", err)
	}
	if c.leftovers, err = instance.ParseLeftovers(l.text(keyLeftovers)); err != nil {
		l.problems.Add(l.name(keyLeftovers), "%v", err)
	}
	insecure := l.bool(keyInsecureNoAuth)
	c.chap, c.chapFiles, err = credentials(read)
	if err != nil {
		// Nobody can tell whether the portals are protected, so only the default is resolved.
		l.problems.AddError(err)
		c.portals = l.portals(true)
	} else {
		c.portals = l.portals(c.chap.Enabled())
		l.checkExposure(c.portals, c.chap.Enabled(), insecure)
	}
	if err == nil && !c.metricsChosen {
		c.hidePages()
	}
	l.checkPages(c.metricsListen, c.portals)
	if len(images) > 0 {
		l.useImages(c, images)
	} else if len(c.streams.References)+len(c.containers.References) > 0 &&
		l.source(keyDiskDir) == "" && l.source(keyWorkDir) == "" && noneFor(c.workDir) {
		l.useTemporary(c)
	}
	// last, because they start from the common settings
	c.disks = l.single(c.common, c.usageTypes)
	return c, l.problems.Err()
}

// hidePages moves the pages to loopback if no --metrics-listen was given and the disks can be
// reached without CHAP on loopback only. The pages name images, initiators and addresses.
func (c *config) hidePages() {
	remote := func(p daemon.Address) bool { return !p.Loopback() }
	if !c.chap.Enabled() && !slices.ContainsFunc(c.portals, remote) {
		c.metricsListen.Addr = loopback4()
	}
}

// owner tells this daemon from others that use the same work directory. It does not change with a
// restart. The daemons of one pod have different portals, and pods have different host names.
func (c *config) owner() string {
	host, _ := os.Hostname()
	dir := c.diskDir
	if abs, err := filepath.Abs(dir); err == nil {
		dir = abs
	}
	if len(c.images) > 0 {
		dir = "images by name" // in no directory of which others could tell that they are gone
	}
	return fmt.Sprintf("%s %s %v", host, dir, c.portals)
}

// credentials finds the credentials of the environment, and says whether some come from files. The
// name of a file stays out of errors: it may be a secret in the wrong variable, and only package
// chap knows whether it can be shown.
func credentials(read fileReader) (c chap.Config, fromFiles bool, err error) {
	c, err = chap.FromEnvironment(os.LookupEnv, func(path string) ([]byte, error) {
		fromFiles = true
		text, err := read(path)
		return text, withoutPath(err)
	})
	return c, fromFiles, err
}

func (l *loader) copyMode() instance.CopyMode {
	mode, err := instance.ParseCopyMode(l.text(keyCopyMode))
	if err == nil {
		err = mode.Check(nil)
	}
	if err != nil {
		l.problems.Add(l.name(keyCopyMode), "%v", err)
	}
	return mode
}

// controlSocket is the path of the socket, or "".
func (l *loader) controlSocket() string {
	path := l.text(keyControlSocket)
	if path == "" || filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(l.text(keyWorkDir), path)
}

// count is a number of sessions, at least 1.
func (l *loader) count(key string) int {
	n, err := strconv.Atoi(l.text(key))
	if err != nil || n < 1 || n > target.MostConnections {
		l.problems.Add(l.name(key), "%q is not a number from 1 to %d", l.text(key),
			target.MostConnections)
	}
	return n
}

// size is the size of a disk in bytes; 0: not set.
func (l *loader) size(key string) int64 {
	if l.text(key) == "" {
		return 0
	}
	return l.bytes(key, parseSize)
}

// minMemory, in bytes, has room for the longest gathered write (1 MiB) beside receive buffers and
// stalled commands. With less, a daemon would be ready, and would answer some commands with "try
// again" for ever.
const minMemory = 4 << 20

func parseMemory(text string) (int64, error) {
	n, err := parseBytes(text)
	if err == nil && n < minMemory {
		err = fmt.Errorf("%q is too little for the longest commands: use at least %dMi", text,
			minMemory>>20)
	}
	return n, err
}

// bytes is a number of bytes.
func (l *loader) bytes(key string, parse func(text string) (int64, error)) int64 {
	n, err := parse(l.text(key))
	if err != nil {
		l.problems.Add(l.name(key), "%v", err)
	}
	return n
}

func (l *loader) metricsListen() *daemon.Address {
	text := l.text(keyMetricsListen)
	if text == "" {
		return nil
	}
	p, _, err := parsePortal(text, defaultMetricsPort)
	if err != nil {
		l.problems.Add(l.name(keyMetricsListen), "%v", err)
	}
	return &p
}

func (l *loader) logConfig() logConfig {
	c := logConfig{chosen: l.source(keyLogLevel) != ""}
	if text := l.text(keyLogLevel); slices.Contains(logLevels, text) {
		// It cannot fail for these.
		c.level, _ = zapcore.ParseLevel(text)
	} else {
		l.problems.Add(l.name(keyLogLevel), "%q is not a level: use debug, info, warn or error",
			text)
	}
	c.format = l.text(keyLogFormat)
	if c.format != "" && !slices.Contains(logFormats, c.format) {
		l.problems.Add(l.name(keyLogFormat), "%q is not a format: use console or json", c.format)
	}
	return c
}

func (l *loader) bool(key string) bool {
	text := l.text(key)
	v, err := strconv.ParseBool(text)
	if err != nil {
		l.problems.Add(l.name(key), "%q is neither true nor false", text)
	}
	return v
}
