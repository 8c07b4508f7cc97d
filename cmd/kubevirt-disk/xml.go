package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/libvirt"
)

// xmlFlags are the flags of xml that are not settings of serve.
type xmlFlags struct {
	statusURL     string
	timeout       time.Duration
	hosts         []string
	lun           int
	serial, wwn   string
	readOnly      bool
	credential    libvirt.Credential
	dev, bus      string
	kind          string
	bootOrder     uint
	initiator     string
	domain        string
	cache, io     string
	discard       string
	detectZeroes  string
	errorPolicy   string
	rerrorPolicy  string
	secretElement bool
	file          xmlFile
	nbd           xmlNBD
}

const (
	flagStatusURL    = "status-url"
	flagHost         = "host"
	flagLUN          = "lun"
	flagSerial       = "serial"
	flagWWN          = "wwn"
	flagChapUsername = "chap-username"
	flagInitiator    = "initiator-name"
	flagDomain       = "domain"
)

func (a *app) xmlCommand() *cobra.Command {
	var f xmlFlags
	cmd := &cobra.Command{
		Use:   "xml",
		Short: "Print the libvirt XML by which a virtual machine uses a LUN",
		Long: `Prints the <disk> element with which a libvirt domain uses a LUN, or with --secret the
<secret> element that it refers to. A running daemon (--status-url) or flags describe the LUN.
Neither element has the password: libvirt gets it from a file.

  kubevirt-disk xml --status-url http://10.0.0.5:9260 --chap-username vm --domain DOMAIN >disk.xml
  kubevirt-disk xml --status-url http://10.0.0.5:9260 --secret >secret.xml
  virsh secret-define secret.xml
  virsh secret-set-value UUID --file password --plain
  virsh attach-device DOMAIN disk.xml

QEMU logs in with an initiator name made of this machine's name and --domain, so run the command on
the domain's machine. In a live migration the destination needs another name than the source, or the
source cannot be fenced. The machine's name is NODE_NAME or POD_NAME from the environment, or else
the hostname. Two domains of one machine need --domain to be kept apart.

With --nbd the disk is used by NBD, which needs neither a secret nor an initiator name:

  kubevirt-disk xml --nbd unix:/run/disk/nbd.sock >disk.xml
  kubevirt-disk xml --status-url http://10.0.0.5:9260 --nbd auto >disk.xml

With --file it prints the <disk> element for an image in a local file, as the command provide makes
it. With --overlay, QEMU writes to that file, which lies over the image (--copy-mode):

  qemu-img create -f qcow2 -F qcow2 -b /vm/disk.qcow2 /storage/ssd/vm.qcow2
  kubevirt-disk xml --file /vm/disk.qcow2 --overlay /storage/ssd/vm.qcow2 >disk.xml

Exit status 1: the daemon does not answer, or the LUN is not ready.`,
		Args: usageArgs(cobra.NoArgs),
	}
	f.add(cmd)
	own := settings.Pick(newConfig().settings(), keyPort, keyTargetName, keyAccessMode)
	settings.AddFlags(cmd.Flags(), own)
	cmd.RunE = running(func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), f.timeout)
		defer cancel()
		document, err := f.document(ctx, loadBy(settings.ReadBounded, cmd.Flags(), own))
		if err == nil {
			_, err = fmt.Fprintln(a.stdout, document)
		}
		return err
	})
	return cmd
}

func (f *xmlFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.StringVar(&f.statusURL, flagStatusURL, "",
		"`URL` of a running daemon's pages: the LUN is one that this daemon serves")
	flags.DurationVar(&f.timeout, "timeout", 5*time.Second,
		"how long to wait for the daemon's answer")
	flags.BoolVar(&f.secretElement, "secret", false,
		"print the <secret> element instead of the <disk> element")
	flags.StringSliceVar(&f.hosts, flagHost, nil,
		"`address` of the target, HOST or HOST:PORT or [IPv6]:PORT, repeatable; QEMU uses the "+
			"first (default with --status-url: the daemon's)")
	flags.IntVar(&f.lun, flagLUN, 0, "`number` of the LUN (default: the daemon's only one)")
	flags.StringVar(&f.dev, "target-dev", "",
		"device `name` in the guest: vda and so on with bus virtio, else sda (default the bus's "+
			"first)")
	flags.StringVar(&f.bus, "bus", "", "`bus` of the device: virtio, scsi or sata (default by "+
		"the device name)")
	flags.StringVar(&f.kind, "device", "", "`kind` of the device: disk, or lun to pass SCSI "+
		"commands on (default disk)")
	flags.StringVar(&f.credential.Username, flagChapUsername, "", "CHAP user `name`")
	flags.StringVar(&f.credential.SecretUsage, "secret-usage", "",
		"usage `name` of the libvirt secret with the password (default the target name)")
	flags.StringVar(&f.credential.SecretUUID, "secret-uuid", "",
		"`UUID` of the libvirt secret, instead of its usage name")
	flags.StringVar(&f.serial, flagSerial, "",
		"serial `number` that the guest sees, empty for none (default with --status-url: the "+
			"LUN's)")
	flags.StringVar(&f.wwn, flagWWN, "", "WWN that the guest sees, 16 hexadecimal `digits`, "+
		"empty for none (default with --status-url: the LUN's)")
	f.file.add(flags)
	f.nbd.add(flags)
	flags.BoolVar(&f.readOnly, "read-only", false,
		"the guest sees a read-only disk (default by the access mode)")
	flags.UintVar(&f.bootOrder, "boot-order", 0, "`place` in the boot order, from 1 (default none)")
	flags.StringVar(&f.initiator, flagInitiator, "",
		"iSCSI `name` by which QEMU logs in, empty for QEMU's own (default: from this machine's "+
			"name and --domain)")
	flags.StringVar(&f.domain, flagDomain, "",
		"name or UUID of the `domain`, which becomes a part of the default of --initiator-name")
	flags.StringVar(&f.cache, "cache", "", "QEMU's cache `mode` (default none)")
	flags.StringVar(&f.io, "io", "", "QEMU's I/O `mode`: threads, native or io_uring")
	flags.StringVar(&f.discard, "discard", "",
		"what to do with the guest's discards: `mode` unmap or ignore (default unmap)")
	flags.StringVar(&f.detectZeroes, "detect-zeroes", "",
		"whether QEMU looks for zeros in writes: `mode` off, on or unmap")
	flags.StringVar(&f.errorPolicy, "error-policy", "",
		"what a failed command does: `policy` stop, report, ignore or enospace")
	flags.StringVar(&f.rerrorPolicy, "rerror-policy", "",
		"the same for reads: `policy` stop, report or ignore")
}

// document returns the requested XML element.
func (f *xmlFlags) document(ctx context.Context, l loader) (string, error) {
	if f.file.isGiven(l.Flags) {
		return f.fileDocument(l)
	}
	if f.nbd.isGiven(l.Flags) {
		return f.exportDocument(ctx, l)
	}
	var lun libvirt.LUN
	var err error
	if f.statusURL != "" || l.Flags.Changed(flagStatusURL) {
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
		device := f.device()
		device.Initiator = f.initiatorName(l)
		if err := l.Problems.Err(); err != nil {
			return "", err
		}
		text, err = libvirt.DiskXML(lun, device)
	}
	return text, l.explainFields(err)
}

// reference returns the credential. Its secret has the name of the target unless a flag says
// otherwise.
func (f *xmlFlags) reference(targetName string) libvirt.Credential {
	c := f.credential
	if c.SecretUsage == "" && c.SecretUUID == "" {
		c.SecretUsage = targetName
	}
	return c
}

func (f *xmlFlags) device() libvirt.Device {
	return libvirt.Device{
		Dev: f.dev, Bus: libvirt.Bus(f.bus), Kind: libvirt.Kind(f.kind), BootOrder: f.bootOrder,
		Cache: libvirt.Cache(f.cache), IO: libvirt.IO(f.io), Discard: libvirt.Discard(f.discard),
		DetectZeroes:    libvirt.Zeroes(f.detectZeroes),
		ErrorPolicy:     libvirt.ErrorPolicy(f.errorPolicy),
		ReadErrorPolicy: libvirt.ErrorPolicy(f.rerrorPolicy),
	}
}

// initiatorName returns the given name, or a name for this machine. QEMU's default would be the
// same on both machines of a live migration.
func (f *xmlFlags) initiatorName(l loader) string {
	if l.Flags.Changed(flagInitiator) {
		if f.domain != "" {
			l.Problems.Add("--"+flagDomain,
				"cannot be combined with --%s: leave one of them out",
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

// describedLUN returns the LUN as the flags, or the settings of a daemon, describe it.
func (f *xmlFlags) describedLUN(l loader) (libvirt.LUN, error) {
	lun := libvirt.LUN{
		TargetName: l.Text(keyTargetName), Number: f.lun,
		AccessMode: libvirt.AccessMode(l.Text(keyAccessMode)), Serial: f.serial, WWN: f.wwn,
	}
	lun.Portals = f.portals(l, l.connectPort(defaultPort, true))
	if f.secretElement {
		// The secret only needs its name.
		return lun, l.Problems.Err()
	}
	if !l.Flags.Changed(flagLUN) {
		l.Problems.Add("--"+flagLUN, "is missing: name the LUN, from 1, or the daemon that "+
			"serves it (--%s)", flagStatusURL)
	}
	if len(f.hosts) == 0 {
		l.Problems.Add("--"+flagHost, "is missing: name the target's address, or the daemon that "+
			"serves it (--%s)", flagStatusURL)
	}
	return lun, l.Problems.Err()
}

// connectPort returns the port for addresses without one: the value of --port or, with settings, of
// any other source of that setting. Without one, it returns otherwise.
func (l loader) connectPort(otherwise uint16, settings bool) uint16 {
	if !l.Flags.Changed(keyPort) && (!settings || l.Source(keyPort) == "") {
		return otherwise
	}
	port, err := parsePort(l.Text(keyPort))
	if err == nil && port == 0 {
		err = errors.New("0 is not a port to connect to: want 1 to 65535")
	}
	if err != nil {
		l.Problems.Add(l.Source(keyPort), "%v", err)
		return otherwise
	}
	return port
}

// portals returns the portals of --host, each with its own port or the given one.
func (f *xmlFlags) portals(l loader, port uint16) []libvirt.Portal {
	var all []libvirt.Portal
	for _, host := range f.hosts {
		p, err := libvirt.ParsePortal(strings.TrimSpace(host))
		switch {
		case err != nil:
			l.Problems.Add("--"+flagHost, "%v", err)
			continue
		case p.Port == 0:
			p.Port = port
		case l.Flags.Changed(keyPort) && p.Port != port:
			l.Problems.Add("--"+flagHost+" and --"+keyPort,
				"%q has another port than %d: give the port only once", host, port)
		}
		all = append(all, p)
	}
	return all
}

// explainFields names the flag of each field that the library refuses, and returns a
// *problems.Error.
func (l loader) explainFields(err error) error {
	if err == nil {
		return nil
	}
	flagOf := map[string]string{
		"LUN.Portals": flagHost, "LUN.Number": flagLUN, "LUN.Serial": flagSerial,
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
		"Export.WWN": flagWWN,
		"File.Path":  flagFile, "File.Format": flagFile, "File.Overlay": flagOverlay,
		"File.CopyMode": keyCopyMode, "File.Serial": flagSerial, "File.WWN": flagWWN,
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
			source = l.Name(keyTargetName)
		case "LUN.AccessMode", "File.AccessMode", "Export.AccessMode":
			source = l.Name(keyAccessMode)
		}
		l.Problems.Add(source, "%s", wrong.Problem)
	}
	return l.Problems.Err()
}
