package xml

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/loopback"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/pages"
	"kubevirt.io/disk/status"
)

const (
	flagNBD       = "nbd"
	flagExport    = "export"
	flagTLS       = "tls"
	flagReconnect = "reconnect"

	// nbdAuto chooses a portal of the daemon at --status-url.
	nbdAuto = "auto"
	// nbdSocket precedes the path of a socket.
	nbdSocket = "unix:"
)

// nbdFlags are the flags of xml for an export.
type nbdFlags struct {
	address, export string
	tls             bool
	reconnect       time.Duration
}

func (f *nbdFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.address, flagNBD, "", "`address` of NBD, which is used instead of iSCSI: "+
		"unix:PATH, HOST or HOST:PORT; auto is one of the daemon at --status-url")
	flags.StringVar(&f.export, flagExport, "",
		"`name` of the export at --nbd (default: that of the LUN, or the only one)")
	flags.BoolVar(&f.tls, flagTLS, false, "QEMU uses TLS at --nbd, with libvirt's client "+
		"certificate (default with --status-url: as the daemon asks)")
	flags.DurationVar(&f.reconnect, flagReconnect, 30*time.Second,
		"how long QEMU holds requests while it connects to --nbd again; with --vhost-user, how "+
			"long it waits before each try (default there 1s); 0 leaves that out")
}

// isGiven reports whether the flags are about an export.
func (f *nbdFlags) isGiven(flags *pflag.FlagSet) bool {
	return flags.Changed(flagNBD) || flags.Changed(flagExport) || flags.Changed(flagTLS) ||
		flags.Changed(flagReconnect)
}

// exportDocument returns the element for an export.
func (f *Flags) exportDocument(ctx context.Context, l *settings.Loader) (string, error) {
	refuse(l, forISCSI, fmt.Sprintf("is about iSCSI: leave it out, or leave out --%s", flagNBD))
	if f.nbd.address == "" {
		l.Problems.AddMissing("--"+flagNBD, "want unix:PATH, HOST or HOST:PORT")
	}
	var e libvirt.Export
	var err error
	if l.Flags.Changed(flagStatusURL) {
		e, err = f.servedExport(ctx, l)
	} else {
		e, err = f.describedExport(l)
	}
	if err != nil {
		return "", err
	}
	e.ReadOnly = e.ReadOnly || f.readOnly
	e.TLS = e.TLS || f.nbd.tls
	e.Reconnect = f.nbd.reconnect
	if l.Flags.Changed(flagExport) {
		e.Name = f.nbd.export
	}
	text, err := e.DiskXML(f.device)
	return text, explainFields(l, err)
}

// describedExport returns the export as the flags describe it.
func (f *Flags) describedExport(l *settings.Loader) (libvirt.Export, error) {
	e := libvirt.Export{AccessMode: libvirt.AccessMode(l.Text(settings.KeyAccessMode)),
		Serial: f.serial, WWN: f.wwn}
	if l.Flags.Changed(FlagLUN) {
		e.Name = strconv.Itoa(f.lun)
	}
	if f.nbd.address == nbdAuto {
		l.Problems.Add("--"+flagNBD, "auto needs a daemon to ask (--%s)", flagStatusURL)
	}
	f.nbd.at(&e, l)
	return e, l.Problems.Err()
}

// at sets the place of an export.
func (f *nbdFlags) at(e *libvirt.Export, l *settings.Loader) {
	if path, ok := strings.CutPrefix(f.address, nbdSocket); ok {
		e.Socket = path
		if path == "" {
			l.Problems.Add("--"+flagNBD, "unix: names no socket: want unix:PATH")
		}
		return
	}
	portal, err := libvirt.ParsePortal(f.address)
	if err != nil && f.address != "" {
		l.Problems.Add("--"+flagNBD, "%v, or unix:PATH", err)
	}
	e.Portal = portal
}

// servedExport asks the daemon at --status-url for the LUN of --lun, or for its only LUN.
func (f *Flags) servedExport(ctx context.Context, l *settings.Loader) (libvirt.Export, error) {
	said, pageHost, err := f.ask(ctx, l)
	if err != nil {
		return libvirt.Export{}, err
	}
	served, err := f.choose(said, l)
	if err != nil {
		return libvirt.Export{}, err
	}
	e := pages.ExportForLibvirt(&served, said).For(f.device)
	if l.Flags.Changed(flagSerial) {
		e.Serial = f.serial
	}
	if l.Flags.Changed(flagWWN) {
		e.WWN = f.wwn
	}
	switch {
	case f.nbd.address != nbdAuto:
		f.nbd.at(&e, l)
	case len(said.NBDPortals) == 0:
		l.Problems.Add("--"+flagNBD, "the daemon serves no disk by NBD: start it with --nbd")
	case !atDaemon(&e, said, pageHost):
		l.Problems.Add("--"+flagNBD, "auto finds nothing: none of the daemon's portals of NBD "+
			"(%s) can be reached from where its page was asked; name one that can",
			strings.Join(said.NBDPortals, ", "))
	}
	e.TLS = said.NBDTLS && e.Socket == ""
	return e, l.Problems.Err()
}

// atDaemon finds a portal of NBD that can be reached from the host of the daemon's page: on this
// machine a socket, otherwise an address.
func atDaemon(e *libvirt.Export, said *status.Status, pageHost string) bool {
	if loopback.Is(pageHost) {
		for _, portal := range said.NBDPortals {
			if path, ok := strings.CutPrefix(portal, nbdSocket); ok {
				e.Socket = path
				return true
			}
		}
	}
	_, usable := reachable(said.NBDPortals, pageHost)
	if len(usable) == 0 {
		return false
	}
	e.Portal = usable[0]
	return true
}
