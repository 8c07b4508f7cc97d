package main

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/registry/transport"
	"kubevirt.io/disk/serving"
)

const (
	keyVolumesListen   = "volumes-listen"
	keyVolumesTLSCert  = "volumes-tls-cert"
	keyVolumesTLSKey   = "volumes-tls-key"
	keyVolumesClientCA = "volumes-client-ca"
	keyVolumesToken    = "volumes-token-file"

	defaultVolumesPort = 8443
)

// volumeSettings say how volumes are made on demand.
func volumeSettings(v *options.Volumes) []setting {
	return in(sectionVolumes, []setting{
		{key: keyVolumesListen, env: []string{"VOLUMES_LISTEN"}, empty: true,
			usage: "`address` at which volumes are made on demand (PUT /volume/NAME), as " +
				"127.0.0.1:8443; other than loopback only with a certificate, and a token or " +
				"client certificates (default none)",
			to: into(&v.Listen, parseVolumesListen)},
		{key: "volumes-dir", env: []string{"VOLUMES_DIR"}, kind: kindDir,
			usage: "`directory` of the volumes (default .volumes in the persistent directory, or " +
				"in the work directory)",
			to: text(&v.Dir)},
		{key: keyVolumesTLSCert, env: []string{"VOLUMES_TLS_CERT"}, kind: kindFile,
			usage: "`file` of the certificate (PEM) for that address, read again when it changes",
			to:    text(&v.Access.Cert)},
		{key: keyVolumesTLSKey, env: []string{"VOLUMES_TLS_KEY"}, kind: kindFile,
			usage: "`file` of the certificate's key (PEM)",
			to:    text(&v.Access.Key)},
		{key: keyVolumesClientCA, env: []string{"VOLUMES_CLIENT_CA"}, kind: kindFile,
			usage: "`file` of the authority (PEM) whose client certificates may make volumes",
			to:    text(&v.Access.ClientCA)},
		{key: keyVolumesToken, env: []string{envVolumesToken}, kind: kindFile,
			usage: "`file` of the bearer token with which volumes may be made, read for each " +
				"request",
			to: text(&v.Access.Token)},
		{key: "volumes-portal", env: []string{"VOLUMES_PORTAL"},
			usage: "`HOST:PORT` of the portal in answers (default the address that the client " +
				"used)",
			to: into(&v.Portal, parseHostPort)},
		{key: "volumes-max", env: []string{"VOLUMES_MAX"}, def: "1024",
			usage: "`number` of volumes at once",
			to:    into(&v.Max, upTo(serving.MaxNumber))},
		{key: "volumes-max-bytes", env: []string{"VOLUMES_MAX_BYTES"},
			usage: "`bytes` of all volumes together, as 10Ti (default no limit)",
			to:    into(&v.MaxBytes, parseSize)},
		{key: "volumes-claim", env: []string{"VOLUMES_CLAIM"}, kind: kindList,
			usage: "`NAME=DIRECTORY` of a claim and the directory where it is mounted; volumes " +
				"can be placed on it; repeatable",
			to: claims(&v.Claims)},
		{key: "volumes-url", env: []string{"VOLUMES_URL"}, kind: kindList,
			usage: "`https://HOST[/PATH]` below which volumes may name disks by from: {url}; " +
				"redirects must stay there; repeatable (default none)",
			to: prefixes(&v.URLs)},
	})
}

// volumes says how volumes are made on demand; nil: they are not.
func (l *loader) volumes() *options.Volumes {
	v := new(options.Volumes)
	if l.text(keyVolumesListen) == "" {
		for _, row := range volumeSettings(v) {
			if source := l.source(row.key); row.key != keyVolumesListen && source != "" {
				l.problems.Add(source, "does nothing without an address for volumes: set %s, or "+
					"leave it out", nameOf(keyVolumesListen))
			}
		}
		return nil
	}
	l.land(volumeSettings(v))
	if !v.Listen.Addr.IsValid() && v.Listen.Port == 0 {
		return v // it is wrong, and has been told
	}
	if err := v.Access.Check(v.Listen.Loopback()); err != nil {
		l.problems.Add(l.name(keyVolumesListen), "%v (--%s, --%s, --%s, --%s)", err,
			keyVolumesTLSCert, keyVolumesTLSKey, keyVolumesToken, keyVolumesClientCA)
	}
	return v
}

func parseVolumesListen(text string) (options.Address, error) {
	at, _, err := parsePortal(text, defaultVolumesPort)
	return at, err
}

// claims is a field that takes directories of claims, by their names.
func claims(at *map[string]string) landing {
	return landing{at, func(given []string) error {
		var wrong []error
		all := map[string]string{}
		for _, text := range given {
			name, dir, ok := strings.Cut(text, "=")
			if !ok || name == "" || !filepath.IsAbs(dir) {
				wrong = append(wrong, fmt.Errorf("%q: write NAME=DIRECTORY, with the whole path "+
					"of the directory", text))
				continue
			}
			if _, twice := all[name]; twice {
				wrong = append(wrong, fmt.Errorf("the claim %q is named twice", name))
			}
			all[name] = dir
		}
		*at = all
		return errors.Join(wrong...)
	}}
}

// prefixes is a field that takes beginnings of addresses.
func prefixes(at *[]transport.Prefix) landing {
	return landing{at, func(given []string) error {
		var wrong []error
		var all []transport.Prefix
		for _, text := range given {
			p, err := transport.ParsePrefix(text)
			wrong, all = append(wrong, err), append(all, p)
		}
		*at = all
		return errors.Join(wrong...)
	}}
}

// parseHostPort refuses text that is not the address of a portal.
func parseHostPort(text string) (string, error) {
	host, port, err := net.SplitHostPort(text)
	if err == nil && host == "" {
		err = fmt.Errorf("%q has no host", text)
	}
	if err == nil {
		_, err = parsePort(port)
	}
	if err != nil {
		return "", fmt.Errorf("%w: write HOST:PORT, as storage.example.com:3260", err)
	}
	return text, nil
}
