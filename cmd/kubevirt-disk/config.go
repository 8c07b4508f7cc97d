package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"go.uber.org/zap"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/registry/transport"
)

// config is a complete, checked configuration of serve: the daemon's options, and further settings
// of the command.
type config struct {
	*options.Options
	images        []string // served instead of the images in a directory; empty: none were named
	command       []string // runs while the disks are served; empty: none
	temporary     bool     // WorkDir is made at the start, and removed at the end
	annotations   string   // file of the downward API; "": none
	metricsChosen bool     // Pages is not the default
	insecure      bool     // portals beyond loopback need no CHAP
	log           console.LogConfig
	chapFiles     bool              // a part of CHAP comes from files
	idle          []string          // settings without an effect, and why
	values        map[string]string // the text of each setting, by key
}

func newConfig() *config { return &config{Options: new(options.Options)} }

// loadConfig resolves every setting and reports all errors at once, as a *problems.Error. If images
// are named, they are served instead of those in the directory.
func loadConfig(flags *pflag.FlagSet, read settings.Reader, images ...string) (*config, error) {
	c := newConfig()
	l := loadBy(read, flags, c.settings())
	l.Land(settings.Only(c.settings(), func(s settings.Setting) bool {
		return s.Section != sectionVolumes && s.Section != sectionMachines // each with a check
	}))
	c.Settings.Disk.CopyModeSource = l.Name(keyCopyMode)
	c.WorkDirNamed = l.Source(keyWorkDir) != ""
	c.Images.Named = l.Source(keyDiskDir) != ""
	c.metricsChosen = l.Source(keyMetricsListen) != ""
	c.log.Chosen = l.Source(keyLogLevel) != ""
	l.useHook(c)
	c.ControlSocket = c.socket()
	c.Volumes = l.volumes()
	l.useRegistries(c)
	var words []string
	named := len(c.Containers.References) > 0
	if n := flags.ArgsLenAtDash(); n >= 0 {
		images, words = images[:n], images[n:]
		if !named { // else they are the container's, as for adapt
			c.command, words = append(words, "")[:max(len(words), 1)], nil
		}
	}
	l.containerMachine(&c.Containers.Machine, named, words)
	c.UsageTypes = l.usageTypes(c.annotations)
	c.values = l.texts(c)
	var err error
	c.CHAP, c.chapFiles, err = credentials(read)
	if c.Hook != nil {
		c.CHAP = chap.Config{} // there is no iSCSI
	} else if err != nil {
		// It is unknown whether the portals are protected, so only the default is resolved.
		l.Problems.AddError(err)
		c.Portals = l.portals(c, true)
	} else {
		c.Portals = l.portals(c, c.CHAP.Enabled())
		l.checkExposure(c.Portals, c.CHAP.Enabled(), c.insecure)
	}
	c.NBD = l.nbd(c.NBDTLS)
	l.checkRemotes(c.Remotes)
	if c.Hook != nil {
		c.NBD = append([]options.NBDPortal{c.Hook.NBD()}, c.NBD...)
		c.VhostUserDir = cmp.Or(c.VhostUserDir, c.Hook.VhostUser())
		c.Hook.MemoryLimit = containerMemory()
	} else if err == nil && !c.metricsChosen {
		c.hidePages()
	}
	l.findIdle(c)
	if len(c.command) > 0 {
		l.useCommand(c)
	}
	if len(images) > 0 {
		l.useImages(c, images)
	} else if c.Remote() && c.Hook == nil &&
		l.Source(keyDiskDir) == "" && l.Source(keyWorkDir) == "" && noneFor(c.WorkDir) {
		l.useTemporary(c)
	}
	// last, because they start from the common settings
	c.Settings.Disks = l.single(c.Settings.Disk, c.UsageTypes)
	return c, l.Problems.Err()
}

// findIdle finds settings that have been made but have no effect together with the others. It
// refuses a flag without effect that seems to verify a disk.
func (l loader) findIdle(c *config) {
	idle := func(why string, rows []settings.Setting) {
		for _, row := range rows {
			if source := l.Source(row.Key); source != "" {
				c.idle = append(c.idle, source+": "+why)
			}
		}
	}
	verifies := func(why string, rows []settings.Setting) {
		for _, row := range rows {
			if l.Flags.Changed(row.Key) {
				l.Problems.Add("--"+row.Key, "%s (--image)", why)
			}
		}
		idle(why, rows)
	}
	if len(c.Streams.References)+len(c.Containers.References) == 0 && c.Volumes == nil {
		const why = "is for images in registries and at addresses, and none is named"
		verifies(why, settings.Only(c.settings(), inSection(sectionTrust)))
		idle(why, settings.Only(c.settings(), func(s settings.Setting) bool {
			return inSection(sectionRegistry)(s) && s.Key != keyRecordBoot
		}))
	} else if !slices.ContainsFunc(c.Streams.References, transport.Reference.IsAddress) {
		verifies(noAddress, settings.Pick(c.settings(), keyChecksums))
	}
	if len(c.Portals) == 0 {
		idle("is for iSCSI, which is off", settings.Pick(c.settings(), keyListen, keyPort,
			keyBehindNAT, keyInsecureNoAuth, keyTargetName, keyVolumesPortal))
	} else if c.CHAP.Enabled() && c.insecure {
		idle("is for portals without CHAP, and initiators must present a credential",
			settings.Pick(c.settings(), keyInsecureNoAuth))
	}
	if len(c.Portals) == 0 && c.Hook == nil && c.CHAP.Enabled() {
		c.CHAP = chap.Config{} // the disks must not seem protected
		c.idle = append(c.idle, "CHAP_USERNAME and CHAP_PASSWORD: are for iSCSI, which is off; "+
			"clients of NBD and vhost-user need no password")
	}
	if c.Pages == nil {
		idle("is for the pages, which are off", settings.Pick(c.settings(), keyPagesHost))
	}
	if c.PersistentDir == "" && c.Volumes == nil && c.Hook == nil { // a hook may find one later
		idle("is for persistent disks, and there is no --"+keyPersistentDir,
			settings.Pick(c.settings(), keyOnImageChange))
	}
	if !slices.ContainsFunc(c.NBD, func(p options.NBDPortal) bool { return p.Socket == "" }) {
		idle("is for addresses of --"+keyNBD+", and none has a port", settings.Pick(c.settings(),
			keyNBDTLSCert, keyNBDTLSKey, keyNBDClientCA))
		c.NBDTLS = options.NBDTLS{} // a start does not need the files
	}
}

func inSection(section string) func(settings.Setting) bool {
	return func(s settings.Setting) bool { return s.Section == section }
}

// texts returns the text of each setting, by key, with the content of the files that settings name.
// A reload compares the texts to find changes.
func (l loader) texts(c *config) map[string]string {
	all := map[string]string{}
	for _, s := range c.settings() {
		all[s.Key] = strings.Join(l.List(s.Key), ",")
	}
	for _, key := range []string{keyEntrypoint, keyArgs} {
		all[key] = strings.Join(l.Lines(key), "\n")
	}
	all[keyEnv] = strings.Join(c.Containers.Machine.Env, "\n") // a file may have changed
	all[keyUsageType] = fmt.Sprint(c.UsageTypes)               // annotations may have changed
	return all
}

// options are the daemon's options for this configuration.
func (c *config) options(log *zap.Logger) options.Options {
	opt := *c.Options
	opt.Owner, opt.Build, opt.Log, opt.Table = c.owner(), buildInfo(), log, table
	if len(c.images) > 0 {
		opt.Images = options.Images{Paths: c.images}
	}
	return opt
}

// hidePages moves the pages to loopback if no --metrics-listen was given and the disks can be
// reached without CHAP on loopback only. The pages name images, initiators and addresses.
func (c *config) hidePages() {
	remote := func(p options.Address) bool { return !p.Loopback() }
	if !c.CHAP.Enabled() && !slices.ContainsFunc(c.Portals, remote) {
		c.Pages.Addr = loopback4()
	}
}

// owner distinguishes this daemon from others that use the same work directory. It does not change
// with a restart. The daemons of one pod have different portals, and pods have different host
// names.
func (c *config) owner() string {
	host, _ := os.Hostname()
	dir := c.Images.Dir
	if abs, err := filepath.Abs(dir); err == nil {
		dir = abs
	}
	if len(c.images) > 0 {
		dir = "images by name" // in no directory whose loss others could detect
	}
	if len(c.Portals) == 0 {
		return fmt.Sprintf("%s %s %v", host, dir, c.NBD)
	}
	return fmt.Sprintf("%s %s %v", host, dir, c.Portals)
}

// credentials finds the credentials of the environment, and reports whether some come from files.
func credentials(read settings.Reader) (c chap.Config, fromFiles bool, err error) {
	c, err = chap.FromEnvironment(os.LookupEnv, func(path string) ([]byte, error) {
		fromFiles = true
		return read(path)
	})
	return c, fromFiles, err
}

func parseTargetName(text string) (string, error) { return text, libvirt.CheckName(text) }

// socket is the path of the control socket, or "".
func (c *config) socket() string {
	if c.ControlSocket == "" || filepath.IsAbs(c.ControlSocket) {
		return c.ControlSocket
	}
	return filepath.Join(c.WorkDir, c.ControlSocket)
}

// upTo reads a number from 1 to most.
func upTo(most int) func(text string) (int, error) {
	return func(text string) (int, error) {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > most {
			return 0, fmt.Errorf("%q is not a number from 1 to %d", text, most)
		}
		return n, nil
	}
}

// minMemory, in bytes, has room for the longest gathered write (1 MiB), receive buffers and stalled
// commands. With less, a daemon would be ready, but would answer some commands with "try again" for
// ever.
const minMemory = 4 << 20

func parseMemory(text string) (int64, error) {
	n, err := parseBytes(text)
	if err == nil && n < minMemory {
		err = fmt.Errorf("%q is too little for the longest commands: use at least %dMi", text,
			minMemory>>20)
	}
	return n, err
}

// parsePages reads the address of the pages; nil: none.
func parsePages(text string) (*options.Address, error) {
	if text == "" {
		return nil, nil
	}
	p, _, err := parsePortal(text, defaultMetricsPort)
	return &p, err
}
