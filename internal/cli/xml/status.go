package xml

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"strings"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/loopback"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/pages"
	"kubevirt.io/disk/status"
)

// servedLUN asks the daemon at --status-url for the LUN of --lun, or for its only LUN.
func (f *Flags) servedLUN(ctx context.Context, l *settings.Loader) (libvirt.LUN, error) {
	said, pageHost, err := f.ask(ctx, l)
	if err != nil {
		return libvirt.LUN{}, err
	}
	if f.secretElement {
		return libvirt.LUN{TargetName: said.TargetName}, nil
	}
	served, err := f.choose(said, l)
	if err != nil {
		return libvirt.LUN{}, err
	}
	if len(said.Portals) == 0 { // the server at --host has another disk with that number
		l.Problems.Add("--"+flagStatusURL, "the daemon has no iSCSI: add --%s=%s or --%s=%s",
			flagNBD, nbdAuto, flagVhostUser, vhostUserAuto)
		return libvirt.LUN{}, l.Problems.Err()
	}
	lun := pages.ForLibvirt(&served, said.TargetName).For(f.device)
	// An empty flag means that the guest sees no serial number.
	if l.Flags.Changed(flagSerial) {
		lun.Serial = f.serial
	}
	if l.Flags.Changed(flagWWN) {
		lun.WWN = f.wwn
	}
	switch asks, given := said.Authentication != status.AuthNone, f.credential.Username != ""; {
	case asks && !given:
		l.Problems.AddMissing("--"+flagChapUsername, "the daemon at --%s asks for CHAP",
			flagStatusURL)
	case given && !asks:
		l.Problems.Add("--"+flagChapUsername,
			"the daemon at --%s has no CHAP, and QEMU cannot log in there with a credential: "+
				"leave it out, or give the daemon a credential too", flagStatusURL)
	}
	lun.Portals = f.servedPortals(said, pageHost, l)
	return lun, l.Problems.Err()
}

// ask gets the status of the daemon at --status-url. It also returns the host of its page.
func (f *Flags) ask(ctx context.Context, l *settings.Loader) (said *status.Status, pageHost string,
	err error) {
	for _, key := range []string{settings.KeyTargetName, settings.KeyAccessMode} {
		if l.Flags.Changed(key) {
			l.Problems.Add("--"+key, "the daemon at --%s already reports it: leave one of them out",
				flagStatusURL)
		}
	}
	page, err := statusPage(f.statusURL)
	if err != nil {
		l.Problems.Add("--"+flagStatusURL, "%v", err)
	}
	if err := l.Problems.Err(); err != nil {
		return nil, "", err
	}
	said, err = askStatus(ctx, page.String())
	return said, page.Hostname(), err
}

// statusPage returns the address of /status. The given URL may have that path or none.
func statusPage(text string) (*url.URL, error) {
	page, err := url.Parse(text)
	if strings.Contains(text, "@") { // a password may precede it
		return nil, errors.New("the URL has a user name, which a daemon does not ask for: want " +
			"http://HOST:PORT/status")
	}
	if err != nil {
		return nil, fmt.Errorf("%q is not a URL: want http://HOST:PORT/status", text)
	}
	if page.Scheme != "http" && page.Scheme != "https" || page.Hostname() == "" {
		return nil, fmt.Errorf("%q is not a URL of a web page: want http://HOST:PORT/status", text)
	}
	if page.Path == "" || page.Path == "/" {
		page.Path = "/status"
	}
	return page, nil
}

// maxStatus limits the size of a status page, in bytes. A session takes a few hundred.
const maxStatus = 16 << 20

func askStatus(ctx context.Context, page string) (*status.Status, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, page, nil)
	if err != nil {
		return nil, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("no daemon answers at %s: %w: is it running, with its pages there "+
			"(--%s)?", page, withoutURL(err), settings.KeyMetricsListen)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answers %s", page, res.Status)
	}
	var said status.Status
	if err := json.NewDecoder(io.LimitReader(res.Body, maxStatus)).Decode(&said); err != nil {
		return nil, fmt.Errorf("%s is not a status page of kubevirt-disk: %w", page, err)
	}
	if said.TargetName == "" {
		return nil, fmt.Errorf("%s is not a status page of kubevirt-disk: it names no target", page)
	}
	return &said, nil
}

// withoutURL returns the cause of a request error, for messages that already name the address.
func withoutURL(err error) error {
	if failed, ok := errors.AsType[*url.Error](err); ok {
		return failed.Err
	}
	return err
}

// choose finds the LUN in a status. The LUN must be ready: before that, its serial number is
// unknown.
func (f *Flags) choose(said *status.Status, l *settings.Loader) (status.LUN, error) {
	var numbers []string
	for _, one := range said.LUNs {
		numbers = append(numbers, fmt.Sprintf("%d (%s)", one.LUN, one.Image))
	}
	list := strings.Join(numbers, ", ")
	var found *status.LUN
	for i, one := range said.LUNs {
		if int(one.LUN) == f.lun || !l.Flags.Changed(FlagLUN) && len(said.LUNs) == 1 {
			found = &said.LUNs[i]
		}
	}
	switch {
	case len(said.LUNs) == 0:
		return status.LUN{}, fmt.Errorf("the daemon has no LUN yet, it is %s: ask again "+
			"when /readyz answers 200", said.State)
	case found == nil && l.Flags.Changed(FlagLUN):
		l.Problems.Add("--"+FlagLUN, "the daemon has no LUN %d: it has %s", f.lun, list)
		return status.LUN{}, l.Problems.Err()
	case found == nil:
		l.Problems.AddMissing("--"+FlagLUN, "the daemon has %s", list)
		return status.LUN{}, l.Problems.Err()
	case !found.Ready:
		return status.LUN{}, fmt.Errorf("LUN %d (%s) is not ready: ask again when /readyz "+
			"answers 200", found.LUN, found.Image)
	}
	return *found, nil
}

// servedPortals returns the portals of --host. Without that flag, it returns those of the daemon
// that other machines can reach, or those on loopback if the status page was read there. A portal
// on every address is reached at the host of the status page.
func (f *Flags) servedPortals(said *status.Status, pageHost string,
	l *settings.Loader) []libvirt.Portal {
	bound, usable := reachable(said.Portals, pageHost)
	port := uint16(libvirt.DefaultPort)
	if len(bound) > 0 {
		port = bound[0].Port
	}
	if len(f.hosts) > 0 {
		return f.portals(l, connectPort(l, port, false))
	}
	if len(usable) == 0 {
		l.Problems.AddMissing("--"+flagHost, "none of the daemon's portals (%s) can be "+
			"reached at the address of its page; name an address that leads to one",
			strings.Join(said.Portals, ", "))
		return nil
	}
	// libvirt's schema allows one portal, and QEMU uses one.
	first := usable[0]
	first.Port = connectPort(l, first.Port, false)
	return []libvirt.Portal{first}
}

// reachable returns the addresses of portals as a client uses them, and those that can be reached
// from the host of the status page.
func reachable(portals []string, pageHost string) (bound, usable []libvirt.Portal) {
	for _, text := range portals {
		addr, err := netip.ParseAddrPort(text)
		if err != nil {
			continue // it is a socket, or of a newer daemon with other portals
		}
		p := libvirt.Portal{Host: addr.Addr().String(), Port: addr.Port()}
		if addr.Addr().IsUnspecified() {
			p.Host = pageHost
		}
		bound = append(bound, p)
		if !addr.Addr().IsLoopback() || loopback.Is(pageHost) {
			usable = append(usable, p)
		}
	}
	return bound, usable
}
