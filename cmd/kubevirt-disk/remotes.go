package main

import (
	"errors"
	"fmt"
	"slices"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/nbd"
)

// remotes is a field that takes disks of other servers.
func remotes(at *[]options.Remote) settings.Landing {
	return settings.Landing{At: at, Set: func(given []string) error {
		var wrong []error
		for i, text := range given {
			parsed, err := nbd.ParseURI(text)
			u := options.Remote(parsed)
			switch {
			case err != nil: // it does not repeat the text, which may have a password
				wrong = append(wrong, fmt.Errorf("disk %d: %w", i+1, err))
			case slices.Contains(*at, u):
				wrong = append(wrong, fmt.Errorf("%q is named twice", text))
			default:
				*at = append(*at, u)
			}
		}
		return errors.Join(wrong...)
	}}
}

// checkRemotes finds settings of --disk that do not go together.
func (l loader) checkRemotes(r options.Remotes) {
	secure := func(u options.Remote) bool { return u.TLS }
	if (r.Cert == "") != (r.Key == "") {
		l.Problems.Add("TLS of --"+keyDisk, "takes a certificate and its key: set %s and %s",
			nameOf(keyDiskTLSCert), nameOf(keyDiskTLSKey))
	}
	for _, key := range []string{keyDiskTLSCert, keyDiskServerCA} {
		if l.Source(key) != "" && !slices.ContainsFunc(r.Disks, secure) {
			l.Problems.Add(l.Source(key), "is for disks of nbds://, and %s names none",
				nameOf(keyDisk))
		}
	}
}
