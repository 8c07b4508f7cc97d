package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/internal/daemon"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/cache"
)

// registrySettings say how serve, push and pull reach registries.
var registrySettings = []setting{
	{key: keyRegistryConfig, env: []string{"REGISTRY_CONFIG"},
		usage: "`file` of credentials: docker's config.json, a mounted pull secret, or a " +
			"directory with one (default where docker, podman and skopeo look)"},
	{key: keyRegistryCA, env: []string{"REGISTRY_CA"},
		usage: "`file` of certificates (PEM) that are trusted in addition to the system's"},
	{key: keyRegistryMirror, env: []string{"REGISTRY_MIRROR"}, kind: kindList,
		usage: "`HOST=MIRROR[/PREFIX]`: ask the mirror before that registry; repeatable"},
	{key: keyInsecureRegistry, env: []string{"INSECURE_REGISTRY"}, kind: kindList,
		usage: "`registry` that may be used without TLS, or with a certificate that nobody " +
			"vouches for, as host or host:port; repeatable"},
}

const (
	keyRegistryConfig   = "registry-config"
	keyRegistryCA       = "registry-ca"
	keyRegistryMirror   = "registry-mirror"
	keyInsecureRegistry = "insecure-registry"

	envRegistryUsername = "REGISTRY_USERNAME"
	envRegistryPassword = "REGISTRY_PASSWORD"
)

// When an image without chunk digests is verified.
const (
	verifyAlways       = "always"
	verifyWhenComplete = "when-complete"
)

const registryHelp = `A reference is REGISTRY/NAME:TAG, REGISTRY/NAME@sha256:DIGEST,
oci:DIRECTORY[:TAG], oci-archive:FILE[:TAG] or docker-archive:FILE.

Credentials come from --registry-config, from where docker, podman and skopeo keep them, or from
the environment: REGISTRY_USERNAME and REGISTRY_PASSWORD, or with the suffix _FILE from files, are
for the registry of the reference only. They are never flags.`

// registryKeys are the keys of registrySettings.
var registryKeys = []string{keyRegistryConfig, keyRegistryCA, keyRegistryMirror,
	keyInsecureRegistry}

// withRegistry runs the work of a command about ref with a client, until it ends or is interrupted.
func (a *app) withRegistry(cmd *cobra.Command, ref registry.Reference,
	work func(context.Context, *registry.Client) error) error {
	return a.withRegistryOf(cmd, load(cmd.Flags(), registryKeys...), ref, work)
}

// withRegistryOf is withRegistry with settings that were loaded already.
func (a *app) withRegistryOf(cmd *cobra.Command, l *loader, ref registry.Reference,
	work func(context.Context, *registry.Client) error) error {
	client, err := a.registryClient(l, ref)
	if err != nil {
		return err
	}
	defer client.Close()
	return running(func(cmd *cobra.Command, _ []string) error {
		ctx, stop := a.interruptible(cmd.Context(), nil)
		defer stop()
		return work(ctx, client)
	})(cmd, nil)
}

// registryClient makes a client from the flags, the environment and the settings file, for a
// command about ref.
func (a *app) registryClient(l *loader, ref registry.Reference) (*registry.Client, error) {
	opt := l.registryOptions()
	if err := l.problems.Err(); err != nil {
		return nil, err
	}
	own, err := registryCredential()
	if err != nil {
		return nil, err
	}
	opt.Own, opt.OwnHost = own, ref.Host()
	opt.FirstPatience = firstPatience
	opt.Warn = func(text string) { fmt.Fprintln(a.stderr, harmless(text)) }
	return registry.New(opt)
}

// firstPatience is how long a command asks a registry that has not answered once. A person waits,
// and has perhaps mistyped its name. A daemon waits longer: it may start before its registry.
const firstPatience = 10 * time.Second

// registryOptions are the options that registrySettings set.
func (l *loader) registryOptions() registry.Options {
	return registry.Options{
		Config:    l.text(keyRegistryConfig),
		CA:        l.text(keyRegistryCA),
		Mirrors:   l.list(keyRegistryMirror),
		Insecure:  l.list(keyInsecureRegistry),
		UserAgent: "kubevirt-disk/" + buildInfo().Version,
	}
}

// levelsName is the directory for the levels of container images, inside the cache directory.
const levelsName = "levels"

// streams returns the images that serve reads from registries, and the container images that it
// makes disks from.
func (l *loader) streams() (s daemon.Streams, c daemon.Containers) {
	s.References = l.references(keyImage)
	c.References = l.references(keyContainerImage)
	hosts := map[string]bool{}
	all := slices.Concat(s.References, c.References)
	for _, ref := range all {
		hosts[ref.Host()] = true
	}
	if s.CacheDir = l.text(keyCacheDir); s.CacheDir == "" {
		s.CacheDir = filepath.Join(l.text(keyWorkDir), ".cache")
	}
	c.Dir = filepath.Join(s.CacheDir, levelsName)
	s.CacheSize = l.bytes(keyCacheSize, parseCacheSize)
	switch when := l.text(keyVerify); when {
	case verifyAlways:
	case verifyWhenComplete:
		s.WhenComplete = true
	default:
		l.problems.Add(l.name(keyVerify), "%q is neither %s nor %s", when, verifyAlways,
			verifyWhenComplete)
	}
	s.Registry = l.registryOptions()
	if len(all) == 0 {
		return s, c // without images, credentials do not matter
	}
	own, err := registryCredential()
	if err != nil {
		l.problems.AddError(err)
	}
	if delete(hosts, ""); own.Username != "" {
		if len(hosts) > 1 {
			l.problems.Add(envRegistryUsername,
				"is for one registry, but the images come from several: name a file with a "+
					"credential for each with --%s", keyRegistryConfig)
		}
		s.Registry.Own, s.Registry.OwnHost = own, all[0].Host()
		for host := range hosts {
			s.Registry.OwnHost = host
		}
	}
	return s, c
}

// references are the references in a setting, without duplicates.
func (l *loader) references(key string) (list []registry.Reference) {
	seen := map[string]bool{}
	for _, text := range l.list(key) {
		ref, err := registry.ParseReference(text)
		switch {
		case err != nil:
			l.problems.Add(l.name(key), "%v", err)
		case seen[text]:
			l.problems.Add(l.name(key), "%q is named twice", text)
		default:
			list = append(list, ref)
		}
		seen[text] = true
	}
	return list
}

func parseCacheSize(text string) (int64, error) {
	n, err := parseBytes(text)
	if err == nil && n < cache.MinSize {
		err = fmt.Errorf("%q is too little for a cache: use at least %dMi", text, cache.MinSize>>20)
	}
	return n, err
}

// registryCredential reads the credential from its variables. No error shows their content.
func registryCredential() (own registry.Credential, err error) {
	value := func(name string) (string, error) {
		file, plain := os.Getenv(name+"_FILE"), os.Getenv(name)
		switch {
		case file != "" && plain != "":
			return "", fmt.Errorf("%s and %s_FILE are both set", name, name)
		case file == "":
			return plain, nil
		}
		f, err := os.Open(file)
		if err != nil {
			return "", fmt.Errorf("%s_FILE: %w", name, err)
		}
		defer f.Close()
		content, err := io.ReadAll(io.LimitReader(f, 64<<10))
		return strings.TrimSuffix(string(content), "\n"), err
	}
	if own.Username, err = value(envRegistryUsername); err != nil {
		return own, err
	}
	if own.Password, err = value(envRegistryPassword); err != nil {
		return own, err
	}
	if (own.Username == "") != (own.Password == "") {
		return registry.Credential{}, errors.New(
			"half a credential: set " + envRegistryUsername + " and " +
				envRegistryPassword + ", or neither",
		)
	}
	return own, nil
}
