package main

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"

	"kubevirt.io/disk/internal/cli/settings"
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
	keyVolumesPortal   = "volumes-portal"

	defaultVolumesPort = 8443
)

func volumeSettings(v *options.Volumes) []settings.Setting {
	return settings.InSection(sectionVolumes, []settings.Setting{
		{Key: keyVolumesListen, Env: []string{"VOLUMES_LISTEN"}, Empty: true,
			Usage: "`address` at which volumes are made on demand (PUT /volume/NAME), as " +
				"127.0.0.1:8443; other than loopback only with a certificate, and a token or " +
				"client certificates (default none)",
			To: settings.Into(&v.Listen, parseVolumesListen)},
		{Key: "volumes-dir", Env: []string{"VOLUMES_DIR"}, Kind: settings.KindDir,
			Usage: "`directory` of the volumes (default .volumes in the persistent directory, or " +
				"in the work directory)",
			To: settings.Text(&v.Dir)},
		{Key: keyVolumesTLSCert, Env: []string{"VOLUMES_TLS_CERT"}, Kind: settings.KindFile,
			Usage: "`file` of the certificate (PEM) for that address, read again when it changes",
			To:    settings.Text(&v.Access.Cert)},
		{Key: keyVolumesTLSKey, Env: []string{"VOLUMES_TLS_KEY"}, Kind: settings.KindFile,
			Usage: "`file` of the certificate's key (PEM)",
			To:    settings.Text(&v.Access.Key)},
		{Key: keyVolumesClientCA, Env: []string{"VOLUMES_CLIENT_CA"}, Kind: settings.KindFile,
			Usage: "`file` of the authority (PEM) whose client certificates may make volumes",
			To:    settings.Text(&v.Access.ClientCA)},
		{Key: keyVolumesToken, Env: []string{envVolumesToken}, Kind: settings.KindFile,
			Usage: "`file` of the bearer token with which volumes may be made, read for each " +
				"request",
			To: settings.Text(&v.Access.Token)},
		{Key: keyVolumesPortal, Env: []string{"VOLUMES_PORTAL"},
			Usage: "`HOST:PORT` of the portal in answers (default the address that the client " +
				"used)",
			To: settings.Into(&v.Portal, parseHostPort)},
		{Key: "volumes-max", Env: []string{"VOLUMES_MAX"}, Default: "1024",
			Usage: "`number` of volumes at once",
			To:    settings.Into(&v.Max, upTo(serving.MaxNumber))},
		{Key: "volumes-max-bytes", Env: []string{"VOLUMES_MAX_BYTES"},
			Usage: "`bytes` of all volumes together, as 10Ti (default no limit)",
			To:    settings.Into(&v.MaxBytes, parseSize)},
		{Key: "volumes-claim", Env: []string{"VOLUMES_CLAIM"}, Kind: settings.KindList,
			Usage: "`NAME=DIRECTORY` of a claim and the directory where it is mounted; volumes " +
				"can be placed on it; repeatable",
			To: claims(&v.Claims)},
		{Key: "volumes-url", Env: []string{"VOLUMES_URL"}, Kind: settings.KindList,
			Usage: "`https://HOST[/PATH]` below which volumes may name disks by from: {url}; " +
				"redirects must stay there; repeatable (default none)",
			To: prefixes(&v.URLs)},
	})
}

// volumes returns the settings for volumes on demand; nil: there are none.
func (l loader) volumes() *options.Volumes {
	v := new(options.Volumes)
	if l.Text(keyVolumesListen) == "" {
		for _, row := range volumeSettings(v) {
			if source := l.Source(row.Key); row.Key != keyVolumesListen && source != "" {
				l.Problems.Add(source, "does nothing without an address for volumes: set %s, or "+
					"leave it out", nameOf(keyVolumesListen))
			}
		}
		return nil
	}
	l.Land(volumeSettings(v))
	if !v.Listen.Addr.IsValid() && v.Listen.Port == 0 {
		return v // the problem has been reported
	}
	if err := v.Access.Check(v.Listen.Loopback()); err != nil {
		l.Problems.Add(l.Name(keyVolumesListen), "%v (--%s, --%s, --%s, --%s)", err,
			keyVolumesTLSCert, keyVolumesTLSKey, keyVolumesToken, keyVolumesClientCA)
	}
	return v
}

func parseVolumesListen(text string) (options.Address, error) {
	at, _, err := parsePortal(text, defaultVolumesPort)
	return at, err
}

// claims is a field that takes directories of claims, by their names.
func claims(at *map[string]string) settings.Landing {
	return settings.Landing{At: at, Set: func(given []string) error {
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
func prefixes(at *[]transport.Prefix) settings.Landing {
	return settings.Landing{At: at, Set: func(given []string) error {
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
