package xml

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/libvirt"
)

// Flags are the flags of the command xml that are not settings of serve. Timeout limits Document.
type Flags struct {
	statusURL     string
	Timeout       time.Duration
	hosts         []string
	lun           int
	serial, wwn   string
	readOnly      bool
	credential    libvirt.Credential
	device        libvirt.Device // without its initiator
	initiator     string
	domain        string
	secretElement bool
	file          fileFlags
	nbd           nbdFlags
	vhostUser     vhostUserFlags
}

// Flags that other commands have, too, or that take the name of a file.
const (
	FlagLUN     = "lun"
	FlagFile    = "file"
	FlagOverlay = "overlay"
)

const (
	flagStatusURL    = "status-url"
	flagHost         = "host"
	flagSerial       = "serial"
	flagWWN          = "wwn"
	flagChapUsername = "chap-username"
	flagInitiator    = "initiator-name"
	flagDomain       = "domain"
	flagReadOnly     = "read-only"
)

// forISCSI are the flags that only a LUN of iSCSI has.
var forISCSI = []string{flagHost, flagChapUsername, flagInitiator, flagDomain,
	settings.KeyTargetName, settings.KeyPort, "secret", "secret-usage", "secret-uuid"}

// refuse refuses flags that do not apply to the element.
func refuse(l *settings.Loader, flags []string, why string) {
	for _, flag := range flags {
		if l.Flags.Changed(flag) {
			l.Problems.Add("--"+flag, "%s", why)
		}
	}
}

// Add registers the flags.
func (f *Flags) Add(flags *pflag.FlagSet) {
	flags.SortFlags = false
	flags.StringVar(&f.statusURL, flagStatusURL, "",
		"`URL` of a running daemon's pages: the LUN is one that this daemon serves")
	flags.DurationVar(&f.Timeout, "timeout", 5*time.Second,
		"how long to wait for the daemon's answer")
	flags.BoolVar(&f.secretElement, "secret", false,
		"print the <secret> element instead of the <disk> element")
	flags.StringSliceVar(&f.hosts, flagHost, nil, "`address` of the target, HOST or HOST:PORT or "+
		"[IPv6]:PORT, repeatable; QEMU uses the first (default with --status-url: the daemon's)")
	flags.IntVar(&f.lun, FlagLUN, 0, "`number` of the LUN (default: the daemon's only one)")
	flags.StringVar(&f.device.Dev, "target-dev", "", "device `name` in the guest: vda and so on "+
		"with bus virtio, else sda (default the bus's first)")
	flags.StringVar((*string)(&f.device.Bus), "bus", "", "`bus` of the device: virtio, scsi or "+
		"sata (default by the device name)")
	flags.StringVar((*string)(&f.device.Kind), "device", "", "`kind` of the device: disk, or lun "+
		"to pass SCSI commands on (default disk)")
	flags.StringVar(&f.credential.Username, flagChapUsername, "", "CHAP user `name`")
	flags.StringVar(&f.credential.SecretUsage, "secret-usage", "",
		"usage `name` of the libvirt secret with the password (default the target name)")
	flags.StringVar(&f.credential.SecretUUID, "secret-uuid", "",
		"`UUID` of the libvirt secret, instead of its usage name")
	flags.StringVar(&f.serial, flagSerial, "", "serial `number` that the guest sees, empty for "+
		"none (default with --status-url: the LUN's)")
	flags.StringVar(&f.wwn, flagWWN, "", "WWN that the guest sees, 16 hexadecimal `digits`, "+
		"empty for none (default with --status-url: the LUN's)")
	f.file.add(flags)
	f.nbd.add(flags)
	f.vhostUser.add(flags)
	flags.BoolVar(&f.readOnly, flagReadOnly, false,
		"the guest sees a read-only disk (default by the access mode)")
	flags.UintVar(&f.device.BootOrder, "boot-order", 0,
		"`place` in the boot order, from 1 (default none)")
	flags.StringVar(&f.initiator, flagInitiator, "", "iSCSI `name` by which QEMU logs in, empty "+
		"for QEMU's own (default: from this machine's name and --domain)")
	flags.StringVar(&f.domain, flagDomain, "",
		"name or UUID of the `domain`, which becomes a part of the default of --initiator-name")
	flags.StringVar((*string)(&f.device.Cache), "cache", "", "QEMU's cache `mode` (default none)")
	flags.StringVar((*string)(&f.device.IO), "io", "", "QEMU's I/O `mode`: threads, native or "+
		"io_uring")
	flags.StringVar((*string)(&f.device.Discard), "discard", "",
		"what to do with the guest's discards: `mode` unmap or ignore (default unmap)")
	flags.StringVar((*string)(&f.device.DetectZeroes), "detect-zeroes", "",
		"whether QEMU looks for zeros in writes: `mode` off, on or unmap")
	flags.StringVar((*string)(&f.device.ErrorPolicy), "error-policy", "",
		"what a failed command does: `policy` stop, report, ignore or enospace")
	flags.StringVar((*string)(&f.device.ReadErrorPolicy), "rerror-policy", "",
		"the same for reads: `policy` stop, report or ignore")
}

// Document returns the requested XML element.
func (f *Flags) Document(ctx context.Context, l *settings.Loader) (string, error) {
	if f.file.isGiven(l.Flags) {
		return f.fileDocument(l)
	}
	if f.vhostUser.isGiven(l.Flags) {
		return f.vhostUserDocument(ctx, l)
	}
	if f.nbd.isGiven(l.Flags) {
		return f.exportDocument(ctx, l)
	}
	var lun libvirt.LUN
	var err error
	if f.statusURL != "" {
		lun, err = f.servedLUN(ctx, l)
	} else {
		lun, err = f.describedLUN(l)
	}
	if err != nil {
		return "", err
	}
	var text string
	if f.secretElement {
		text, err = libvirt.SecretXML(f.reference(lun.TargetName))
	} else {
		lun.ReadOnly = lun.ReadOnly || f.readOnly
		if f.credential != (libvirt.Credential{}) {
			lun.Credential = f.reference(lun.TargetName)
		}
		device := f.device
		device.Initiator = f.initiatorName(l)
		if err := l.Problems.Err(); err != nil {
			return "", err
		}
		text, err = libvirt.DiskXML(lun, device)
	}
	return text, explainFields(l, err)
}

// reference returns the credential. Its secret has the name of the target, unless a flag gives
// another.
func (f *Flags) reference(targetName string) libvirt.Credential {
	c := f.credential
	if c.SecretUsage == "" && c.SecretUUID == "" {
		c.SecretUsage = targetName
	}
	return c
}

// initiatorName returns the given name, or a name for this machine. QEMU's default would be the
// same on both machines of a live migration.
func (f *Flags) initiatorName(l *settings.Loader) string {
	if l.Flags.Changed(flagInitiator) {
		if f.domain != "" {
			l.Problems.Add("--"+flagDomain, "cannot be combined with --%s: leave one of them out",
				flagInitiator)
		}
		return f.initiator
	}
	name, err := libvirt.InitiatorName("", f.domain)
	if err != nil {
		l.Problems.Add("--"+flagInitiator, "has no default: %v, or give the name", err)
	}
	return name
}

// describedLUN returns the LUN that the flags, or the settings of a daemon, describe.
func (f *Flags) describedLUN(l *settings.Loader) (libvirt.LUN, error) {
	lun := libvirt.LUN{
		TargetName: l.Text(settings.KeyTargetName), Number: f.lun,
		AccessMode: libvirt.AccessMode(l.Text(settings.KeyAccessMode)),
		Serial:     f.serial, WWN: f.wwn,
	}
	lun.Portals = f.portals(l, connectPort(l, libvirt.DefaultPort, true))
	if f.secretElement {
		// The secret only needs its name.
		return lun, l.Problems.Err()
	}
	if !l.Flags.Changed(FlagLUN) {
		l.Problems.AddMissing("--"+FlagLUN, "name the LUN, from 1, or the daemon that "+
			"serves it (--%s)", flagStatusURL)
	}
	if len(f.hosts) == 0 {
		l.Problems.AddMissing("--"+flagHost, "name the target's address, or the daemon that "+
			"serves it (--%s)", flagStatusURL)
	}
	return lun, l.Problems.Err()
}

// connectPort returns the port for addresses without one: the value of --port or, with anySource,
// that of the variable or the file. Without one, it returns otherwise.
func connectPort(l *settings.Loader, otherwise uint16, anySource bool) uint16 {
	if !l.Flags.Changed(settings.KeyPort) && (!anySource || l.Source(settings.KeyPort) == "") {
		return otherwise
	}
	text := l.Text(settings.KeyPort)
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port == 0 {
		l.Problems.Add(l.Source(settings.KeyPort),
			"%q is not a port to connect to: want 1 to 65535", text)
		return otherwise
	}
	return uint16(port)
}

// portals returns the portals of --host, each with its own port or the given one.
func (f *Flags) portals(l *settings.Loader, port uint16) []libvirt.Portal {
	var all []libvirt.Portal
	for _, host := range f.hosts {
		p, err := libvirt.ParsePortal(strings.TrimSpace(host))
		switch {
		case err != nil:
			l.Problems.Add("--"+flagHost, "%v", err)
			continue
		case p.Port == 0:
			p.Port = port
		case l.Flags.Changed(settings.KeyPort) && p.Port != port:
			l.Problems.Add("--"+flagHost+" and --"+settings.KeyPort,
				"%q has another port than %d: give the port only once", host, port)
		}
		all = append(all, p)
	}
	return all
}

// explainFields names the flag of each field that the library refuses, and returns a
// *problems.Error.
func explainFields(l *settings.Loader, err error) error {
	if err == nil {
		return nil
	}
	flagOf := map[string]string{
		"LUN.Portals": flagHost, "LUN.Number": FlagLUN, "LUN.Serial": flagSerial,
		"LUN.WWN":                 flagWWN,
		"LUN.Credential.Username": flagChapUsername, "LUN.Credential.SecretUsage": "secret-usage",
		"LUN.Credential.SecretUUID": "secret-uuid",
		"Credential.SecretUsage":    "secret-usage", "Credential.SecretUUID": "secret-uuid",
		"Device.Dev": "target-dev", "Device.Bus": "bus", "Device.Kind": "device",
		"Device.Initiator": flagInitiator, "Device.Cache": "cache",
		"Device.IO": "io", "Device.Discard": "discard", "Device.DetectZeroes": "detect-zeroes",
		"Device.ErrorPolicy":     "error-policy",
		"Device.ReadErrorPolicy": "rerror-policy",
		"Export.Name":            flagExport,
		"Export.Socket":          flagNBD, "Export.Portal": flagNBD, "Export.Portal.Host": flagNBD,
		"Export.TLS": flagTLS, "Export.Reconnect": flagReconnect, "Export.Serial": flagSerial,
		"Export.WWN":          flagWWN,
		"VhostUser.Socket":    flagVhostUser,
		"VhostUser.Queues":    flagQueues,
		"VhostUser.Reconnect": flagReconnect,
		"File.Path":           FlagFile, "File.Format": FlagFile, "File.Overlay": FlagOverlay,
		"File.CopyMode": settings.KeyCopyMode, "File.Serial": flagSerial, "File.WWN": flagWWN,
	}
	list := []error{err}
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		list = joined.Unwrap()
	}
	for _, one := range list {
		var wrong *libvirt.FieldError
		if !errors.As(one, &wrong) {
			return err
		}
		field, _, _ := strings.Cut(wrong.Field, "[")
		source := "--" + flagOf[field]
		switch field {
		case "LUN.TargetName":
			source = l.Name(settings.KeyTargetName)
		case "LUN.AccessMode", "File.AccessMode", "Export.AccessMode":
			source = l.Name(settings.KeyAccessMode)
		}
		l.Problems.Add(source, "%s", wrong.Problem)
	}
	return l.Problems.Err()
}

// fileFlags are the flags of xml for an image in a local file.
type fileFlags struct {
	path, overlay string
	copyMode      string
}

func (f *fileFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.path, FlagFile, "",
		"`path` of an image on the domain's machine, .qcow2 or .raw, instead of a LUN")
	flags.StringVar(&f.overlay, FlagOverlay, "",
		"`path` of the file over that image, or in mode clone of its copy")
	flags.StringVar(&f.copyMode, settings.KeyCopyMode, "",
		"what the overlay stores: `mode` none, copy-on-write, copy-on-read or clone (default "+
			"copy-on-write with --overlay, else none)")
}

// isGiven reports whether the flags are about a file.
func (f *fileFlags) isGiven(flags *pflag.FlagSet) bool {
	return flags.Changed(FlagFile) || flags.Changed(FlagOverlay) ||
		flags.Changed(settings.KeyCopyMode)
}

// fileDocument returns the element for an image in a local file.
func (f *Flags) fileDocument(l *settings.Loader) (string, error) {
	refuse(l, append([]string{flagStatusURL, FlagLUN, flagNBD, flagExport, flagTLS, flagReconnect,
		flagVhostUser, flagQueues, flagMemoryBacking}, forISCSI...),
		fmt.Sprintf("is about a LUN: leave it out, or leave out --%s, --%s and --%s", FlagFile,
			FlagOverlay, settings.KeyCopyMode))
	file := libvirt.File{Path: f.file.path, Overlay: f.file.overlay,
		CopyMode: libvirt.CopyMode(f.file.copyMode), ReadOnly: f.readOnly,
		AccessMode: libvirt.AccessMode(l.Text(settings.KeyAccessMode)),
		Serial:     f.serial, WWN: f.wwn}
	if file.CopyMode == "" && file.Overlay != "" {
		file.CopyMode = libvirt.CopyOnWrite
	}
	if err := l.Problems.Err(); err != nil {
		return "", err
	}
	text, err := file.DiskXML(f.device)
	return text, explainFields(l, err)
}
