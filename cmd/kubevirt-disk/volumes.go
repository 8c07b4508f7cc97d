package main

import (
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"

	"kubevirt.io/disk/internal/daemon"
	"kubevirt.io/disk/volume/server"
)

const (
	keyVolumesListen   = "volumes-listen"
	keyVolumesDir      = "volumes-dir"
	keyVolumesTLSCert  = "volumes-tls-cert"
	keyVolumesTLSKey   = "volumes-tls-key"
	keyVolumesClientCA = "volumes-client-ca"
	keyVolumesToken    = "volumes-token-file"
	keyVolumesPortal   = "volumes-portal"
	keyVolumesMax      = "volumes-max"
	keyVolumesMaxBytes = "volumes-max-bytes"
	keyVolumesClaim    = "volumes-claim"

	defaultVolumesPort = 8443
)

// volumeSettings say how volumes are made on demand.
var volumeSettings = []setting{
	{key: keyVolumesListen, env: []string{"VOLUMES_LISTEN"}, empty: true,
		usage: "`address` at which volumes are made on demand (PUT /volume/NAME), as " +
			"127.0.0.1:8443; other than loopback only with a certificate, and a token or client " +
			"certificates (default none)"},
	{key: keyVolumesDir, env: []string{"VOLUMES_DIR"},
		usage: "`directory` of the volumes (default .volumes in the persistent directory, or in " +
			"the work directory)"},
	{key: keyVolumesTLSCert, env: []string{"VOLUMES_TLS_CERT"},
		usage: "`file` of the certificate (PEM) for that address, read again when it changes"},
	{key: keyVolumesTLSKey, env: []string{"VOLUMES_TLS_KEY"},
		usage: "`file` of the certificate's key (PEM)"},
	{key: keyVolumesClientCA, env: []string{"VOLUMES_CLIENT_CA"},
		usage: "`file` of the authority (PEM) whose client certificates may make volumes"},
	{key: keyVolumesToken, env: []string{"VOLUMES_TOKEN_FILE"},
		usage: "`file` of the bearer token with which volumes may be made, read for each request"},
	{key: keyVolumesPortal, env: []string{"VOLUMES_PORTAL"},
		usage: "`HOST:PORT` of the portal in answers (default the address that the client used)"},
	{key: keyVolumesMax, env: []string{"VOLUMES_MAX"}, def: "1024",
		usage: "`number` of volumes at once"},
	{key: keyVolumesMaxBytes, env: []string{"VOLUMES_MAX_BYTES"},
		usage: "`bytes` of all volumes together, as 10Ti (default no limit)"},
	{key: keyVolumesClaim, env: []string{"VOLUMES_CLAIM"}, kind: kindList,
		usage: "`NAME=DIRECTORY` of a claim and the directory where it is mounted; volumes can " +
			"be placed on it; repeatable"},
}

// volumes says how volumes are made on demand; nil: they are not.
func (l *loader) volumes() *daemon.Volumes {
	v := &daemon.Volumes{
		Dir: l.text(keyVolumesDir),
		Access: server.Access{Cert: l.text(keyVolumesTLSCert), Key: l.text(keyVolumesTLSKey),
			ClientCA: l.text(keyVolumesClientCA), Token: l.text(keyVolumesToken)},
		Portal:   l.text(keyVolumesPortal),
		MaxBytes: l.size(keyVolumesMaxBytes),
		Claims:   map[string]string{},
	}
	listen := l.text(keyVolumesListen)
	if listen == "" {
		for _, row := range volumeSettings {
			if source := l.source(row.key); row.key != keyVolumesListen && source != "" {
				l.problems.Add(source, "does nothing without an address for volumes: set %s, or "+
					"leave it out", nameOf(keyVolumesListen))
			}
		}
		return nil
	}
	var err error
	if v.Listen, _, err = parsePortal(listen, defaultVolumesPort); err != nil {
		l.problems.Add(l.name(keyVolumesListen), "%v", err)
	} else if err := v.Access.Check(v.Listen.Loopback()); err != nil {
		l.problems.Add(l.name(keyVolumesListen), "%v (--%s, --%s, --%s, --%s)", err,
			keyVolumesTLSCert, keyVolumesTLSKey, keyVolumesToken, keyVolumesClientCA)
	}
	if v.Portal != "" {
		if err := checkHostPort(v.Portal); err != nil {
			l.problems.Add(l.name(keyVolumesPortal), "%v", err)
		}
	}
	if v.Max, err = strconv.Atoi(l.text(keyVolumesMax)); err != nil || v.Max < 1 || v.Max > maxLUN {
		l.problems.Add(l.name(keyVolumesMax), "%q is not a number from 1 to %d",
			l.text(keyVolumesMax),
			maxLUN)
	}
	for _, text := range l.list(keyVolumesClaim) {
		name, dir, ok := strings.Cut(text, "=")
		if !ok || name == "" || !filepath.IsAbs(dir) {
			l.problems.Add(l.name(keyVolumesClaim), "%q: write NAME=DIRECTORY, with the whole "+
				"path of the directory", text)
			continue
		}
		if _, twice := v.Claims[name]; twice {
			l.problems.Add(l.name(keyVolumesClaim), "the claim %q is named twice", name)
		}
		v.Claims[name] = dir
	}
	return v
}

// checkHostPort refuses text that is not the address of a portal.
func checkHostPort(text string) error {
	host, port, err := net.SplitHostPort(text)
	if err == nil && host == "" {
		err = fmt.Errorf("%q has no host", text)
	}
	if err == nil {
		_, err = parsePort(port)
	}
	if err != nil {
		return fmt.Errorf("%w: write HOST:PORT, as storage.example.com:3260", err)
	}
	return nil
}
