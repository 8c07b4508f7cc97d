package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/disk/unpack"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/keychain"
	"kubevirt.io/disk/registry/signature"
	"kubevirt.io/disk/registry/transport"
)

// reach has the settings for access to registries and for the trust in images.
type reach struct {
	transport.Options
	Signatures signature.Options
}

func (r *reach) settings() []settings.Setting {
	return slices.Concat(registrySettings(&r.Options), trustSettings(&r.Signatures))
}

// withAddresses are the settings of a command that also takes addresses.
func (r *reach) withAddresses() []settings.Setting {
	return slices.Concat(r.settings(), addressSettings(&r.Options))
}

// registrySettings are the settings of serve, push and pull for access to registries.
func registrySettings(o *transport.Options) []settings.Setting {
	return settings.InSection(sectionRegistry, []settings.Setting{
		{Key: keyRegistryConfig, Env: []string{"REGISTRY_CONFIG"}, Kind: settings.KindFile,
			Usage: "`file` of credentials: docker's config.json, a mounted pull secret, or a " +
				"directory with one (default where docker, podman and skopeo look)",
			To: settings.Text(&o.Config)},
		{Key: "registry-ca", Env: []string{"REGISTRY_CA"}, Kind: settings.KindFile,
			Usage: "`file` of certificates (PEM) that are trusted in addition to the system's",
			To:    settings.Text(&o.CA)},
		{Key: "registry-mirror", Env: []string{"REGISTRY_MIRROR"}, Kind: settings.KindList,
			Usage: "`HOST=MIRROR[/PREFIX]`: ask the mirror before that registry; repeatable",
			To:    settings.List(&o.Mirrors)},
		{Key: "insecure-registry", Env: []string{"INSECURE_REGISTRY"}, Kind: settings.KindList,
			Usage: "`registry` that may be used without TLS, or with a certificate that nobody " +
				"vouches for, as host or host:port; repeatable",
			To: settings.List(&o.Insecure)},
	})
}

func trustSettings(asked *signature.Options) []settings.Setting {
	return settings.InSection(sectionTrust, []settings.Setting{
		{Key: keyVerifyKey, Env: []string{"VERIFY_KEY"}, Kind: settings.KindList,
			Usage: "PEM `file` with a public key, as cosign's: every image must be signed by one " +
				"of them; repeatable",
			To: keyFiles(&asked.Keys)},
		{Key: keySignaturePolicy, Env: []string{"SIGNATURE_POLICY"}, Kind: settings.KindFile,
			Usage: "YAML `file` that says which keys images must be signed by, by repository",
			To:    settings.Into(&asked.Policy, parsePolicy)},
	})
}

// addressSettings are the settings for files at addresses, for the commands that take addresses.
func addressSettings(o *transport.Options) []settings.Setting {
	return settings.InSection(sectionTrust, []settings.Setting{
		{Key: keyChecksums, Env: []string{"CHECKSUMS"},
			Usage: "`file` with the SHA-256 of each https:// address that has no digest, as " +
				"sha256sum writes it: a name beside the address, as SHA256SUMS, or an address",
			To: settings.Text(&o.Checksums)},
	})
}

const noAddress = "is for disks at https:// addresses, and none is named"

// forAddress refuses --checksums for what is at no address: the file would not be looked at, and
// the disk could be taken for one that was compared with it.
func (l loader) forAddress(ref transport.Reference) {
	if l.Flags.Changed(keyChecksums) && !ref.IsAddress() {
		l.Problems.Add("--"+keyChecksums, noAddress)
	}
}

// unpackSetting limits the memory that compressed data needs.
func unpackSetting(at *int64, def string) settings.Setting {
	return settings.Setting{Key: keyUnpackMemory, Env: []string{"UNPACK_MEMORY"}, Default: def,
		Usage: "`bytes` of memory that unpacking a compressed disk may take, from 8Mi to 96Mi: " +
			"\"xz -9\" needs 64Mi",
		To: settings.Into(at, parseUnpackMemory)}
}

// defaultUnpack is for commands that people run for one disk.
const defaultUnpack = "96Mi"

func parseUnpackMemory(text string) (int64, error) {
	n, err := parseBytes(text)
	if err == nil && (n < unpack.MinMemory || n > unpack.MaxMemory) {
		err = fmt.Errorf("%q is not between %dMi and %dMi", text, unpack.MinMemory>>20,
			unpack.MaxMemory>>20)
	}
	return n, err
}

// keyFiles is a field that takes the names of files with public keys.
func keyFiles(at *[]string) settings.Landing {
	return settings.Landing{At: at, Set: func(given []string) error {
		*at = given
		return signature.Options{Keys: given}.Check()
	}}
}

func parsePolicy(file string) (string, error) {
	return file, signature.Options{Policy: file}.Check()
}

const (
	keyRegistryConfig  = "registry-config"
	keyVerifyKey       = "verify-key"
	keySignaturePolicy = "signature-policy"
	keyChecksums       = "checksums"
	keyUnpackMemory    = "unpack-memory"

	envRegistryUsername = "REGISTRY_USERNAME"
	envRegistryPassword = "REGISTRY_PASSWORD"
)

// When an image without chunk digests is verified.
const (
	verifyAlways       = "always"
	verifyWhenComplete = "when-complete"
)

const registryHelp = `A reference is REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:DIGEST. That of an image that is only
read may also be oci:DIRECTORY[:TAG], oci-archive:FILE[:TAG] or docker-archive:FILE.

Credentials come from --registry-config, from where docker, podman and skopeo keep them, or from
the environment: REGISTRY_USERNAME and REGISTRY_PASSWORD, or with the suffix _FILE from files, are
for the registry of the reference only. They are never flags.`

// withRegistry runs the work of a command for ref with a client, until it ends or is interrupted.
func (a *app) withRegistry(cmd *cobra.Command, ref transport.Reference,
	work func(context.Context, *registry.Client) error) error {
	var opt reach
	l := load(cmd.Flags(), opt.settings())
	return a.withRegistryOf(cmd, l, opt, ref, work)
}

func (a *app) withRegistryOf(cmd *cobra.Command, l loader, opt reach,
	ref transport.Reference, work func(context.Context, *registry.Client) error) error {
	client, err := a.registryClient(l, opt, ref)
	if err != nil {
		return err
	}
	defer client.Close()
	return running(func(cmd *cobra.Command, _ []string) error {
		ctx, stop := a.interruptible(cmd.Context(), nil, nil)
		defer stop()
		err := work(ctx, client)
		if ctx.Err() == nil || !errors.Is(err, context.Canceled) { // such as: work has better words
			return err
		}
		said := []error{errors.New("interrupted: run the same command again")}
		if all, ok := err.(interface{ Unwrap() []error }); ok { // others may say what is left
			for _, err := range all.Unwrap() {
				if !errors.Is(err, context.Canceled) {
					said = append(said, err)
				}
			}
		}
		return errors.Join(said...)
	})(cmd, nil)
}

// registryClient makes a client with the settings that l has loaded, for a command about ref.
func (a *app) registryClient(l loader, opt reach, ref transport.Reference) (
	*registry.Client, error) {
	if err := l.Problems.Err(); err != nil {
		return nil, err
	}
	own, err := registryCredential()
	if err != nil {
		return nil, err
	}
	if opt.Gate, err = signature.NewGate(opt.Signatures); err != nil {
		return nil, err
	}
	opt.Own, opt.OwnHost = own, ref.Host()
	opt.UserAgent = userAgent()
	opt.FirstTimeout = firstTimeout
	opt.Warn = func(text string) { fmt.Fprintln(a.stderr, console.Harmless(text)) }
	return registry.New(opt.Options)
}

func userAgent() string { return "kubevirt-disk/" + buildInfo().Version }

// firstTimeout is how long a command tries to reach a registry that has never answered. A person
// waits, and may have mistyped the name. A daemon tries longer, because it may start before its
// registry.
const firstTimeout = 10 * time.Second

// levelsName is the directory for the levels of container images, inside the cache directory.
const levelsName = "levels"

// useRegistries completes the settings of serve for images in registries.
func (l loader) useRegistries(c *config) {
	s := &c.Streams
	s.CacheDir = cmp.Or(s.CacheDir, filepath.Join(c.WorkDir, ".cache"))
	c.Containers.Dir = filepath.Join(s.CacheDir, levelsName)
	s.Registry.UserAgent = userAgent()
	if len(s.Signatures.Keys) > 0 && s.Signatures.Policy != "" {
		l.Problems.AddError(s.Signatures.Check())
	}
	all := slices.Concat(s.References, c.Containers.References)
	if len(all) == 0 {
		return // without images, credentials do not matter
	}
	own, err := registryCredential()
	if err != nil {
		l.Problems.AddError(err)
	}
	hosts := map[string]bool{}
	for _, ref := range all {
		hosts[ref.Host()] = true
	}
	if delete(hosts, ""); own.Username != "" {
		if len(hosts) > 1 {
			l.Problems.Add(envRegistryUsername, "is for one registry, but the images come from "+
				"several: name a file with a credential for each with --%s", keyRegistryConfig)
		}
		s.Registry.Own, s.Registry.OwnHost = own, all[0].Host()
		for host := range hosts {
			s.Registry.OwnHost = host
		}
	}
}

// references is a field that takes references that parse can read, each once.
func references(at *[]transport.Reference,
	parse func(string) (transport.Reference, error)) settings.Landing {
	return settings.Landing{At: at, Set: func(given []string) error {
		var wrong []error
		seen := map[string]bool{}
		for _, text := range given {
			ref, err := parse(text)
			name := ref.String()
			info, missing := os.Stat(text)
			switch {
			case missing == nil && info.Mode().IsRegular():
				wrong = append(wrong, fmt.Errorf("%q is a file, and no reference: name a disk "+
					"without this setting (serve FILE), and the archive of an image as "+
					"oci-archive:FILE or docker-archive:FILE", text))
			case err != nil:
				wrong = append(wrong, err)
			case seen[name]:
				wrong = append(wrong, fmt.Errorf("%q is named twice", name))
			default:
				*at = append(*at, ref)
			}
			seen[name] = true
		}
		return errors.Join(wrong...)
	}}
}

func parseVerify(text string) (whenComplete bool, err error) {
	if text != verifyAlways && text != verifyWhenComplete {
		err = fmt.Errorf("%q is neither %s nor %s", text, verifyAlways, verifyWhenComplete)
	}
	return text == verifyWhenComplete, err
}

func parseCacheSize(text string) (int64, error) {
	n, err := parseBytes(text)
	if err == nil && n < cache.MinSize {
		err = fmt.Errorf("%q is too little for a cache: use at least %dMi", text, cache.MinSize>>20)
	}
	return n, err
}

// registryCredential reads the credential from its variables. No error shows their content.
func registryCredential() (own keychain.Credential, err error) {
	if own.Username, err = secretOf(envRegistryUsername); err != nil {
		return own, err
	}
	if own.Password, err = secretOf(envRegistryPassword); err != nil {
		return own, err
	}
	if (own.Username == "") != (own.Password == "") {
		return keychain.Credential{}, errors.New(
			"half a credential: set " + envRegistryUsername + " and " +
				envRegistryPassword + ", or neither",
		)
	}
	return own, nil
}

// secretOf reads a variable, or the file that the one with the suffix _FILE names.
func secretOf(name string) (string, error) {
	file, plain := os.Getenv(name+"_FILE"), os.Getenv(name)
	switch {
	case file != "" && plain != "":
		return "", fmt.Errorf("%s and %s_FILE are both set", name, name)
	case file == "":
		return plain, nil
	}
	content, err := osfile.ReadText(file)
	if err != nil {
		// Do not show the name: it may be a secret in the wrong variable.
		return "", fmt.Errorf("%s_FILE names a file that cannot be read: %w", name,
			osfile.WithoutPath(err))
	}
	return strings.TrimSuffix(string(content), "\n"), nil
}
