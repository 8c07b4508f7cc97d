package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/docker/cli/cli/config"
	"github.com/docker/cli/cli/config/configfile"
	"github.com/docker/cli/cli/config/types"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
)

const (
	// maxConfig bounds a file of credentials. Bytes; a Kubernetes secret has at most a MiB.
	maxConfig = 4 << 20
	// credentialAge is how long a credential is used before it is looked up again. Tokens in a file
	// or from a helper expire and are replaced there.
	credentialAge = time.Minute
)

// Credential is a user name and a password or token. Its String shows neither.
type Credential struct{ Username, Password string }

func (Credential) String() string   { return "(credential)" }
func (Credential) GoString() string { return "(credential)" }

// keychain finds the credential for a repository: in the given file, or else where docker and
// podman keep theirs.
type keychain struct {
	file string // "": where docker and podman look
	own  Credential
	host string // of the registry that own is for
}

// Resolve is what go-containerregistry calls. The result looks the credential up again when it is
// old.
func (k *keychain) Resolve(target authn.Resource) (authn.Authenticator, error) {
	a := &looked{keychain: k, target: target}
	if _, err := a.AuthorizationContext(context.Background()); err != nil {
		return nil, err
	}
	if *a.config == (authn.AuthConfig{}) {
		return authn.Anonymous, nil
	}
	return a, nil
}

func (k *keychain) lookup(target authn.Resource) (authn.AuthConfig, error) {
	if k.own != (Credential{}) && target.RegistryStr() == k.host {
		return authn.AuthConfig{Username: k.own.Username, Password: k.own.Password}, nil
	}
	if k.file == "" {
		found, err := authn.DefaultKeychain.Resolve(target)
		if err != nil {
			return authn.AuthConfig{}, fmt.Errorf(
				"credentials for %s: %w",
				target.RegistryStr(),
				err,
			)
		}
		auth, err := found.Authorization()
		if err != nil {
			return authn.AuthConfig{}, err
		}
		return *auth, nil
	}
	file, err := readConfig(k.file)
	if err != nil {
		return authn.AuthConfig{}, err
	}
	auth, err := credentialOf(file, target)
	if err != nil {
		return authn.AuthConfig{}, fmt.Errorf(
			"credentials for %s from %q: %w",
			target.RegistryStr(),
			k.file,
			err,
		)
	}
	return authn.AuthConfig{Username: auth.Username, Password: auth.Password, Auth: auth.Auth,
		IdentityToken: auth.IdentityToken, RegistryToken: auth.RegistryToken}, nil
}

// looked is a credential that is looked up again from time to time.
type looked struct {
	keychain *keychain
	target   authn.Resource

	mu     sync.Mutex
	config *authn.AuthConfig // guarded by mu
	at     time.Time         // guarded by mu
}

func (a *looked) Authorization() (*authn.AuthConfig, error) {
	return a.AuthorizationContext(context.Background())
}

func (a *looked) AuthorizationContext(context.Context) (*authn.AuthConfig, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.config == nil || time.Since(a.at) > credentialAge {
		found, err := a.keychain.lookup(a.target)
		if err != nil {
			return nil, err
		}
		a.config, a.at = &found, time.Now()
	}
	copied := *a.config
	return &copied, nil
}

// configNames are the names to look for in a directory: docker's own, and that of a mounted
// Kubernetes pull secret.
var configNames = []string{".dockerconfigjson", "config.json", ".dockercfg"}

// readConfig reads docker's config.json or a pull secret. An error never contains its content.
func readConfig(file string) (*configfile.ConfigFile, error) {
	info, err := os.Stat(file)
	if err != nil {
		return nil, fmt.Errorf("registry credentials: %w", err)
	}
	if info.IsDir() {
		dir := file
		file = ""
		for _, n := range configNames {
			if _, err := os.Stat(filepath.Join(dir, n)); !errors.Is(err, fs.ErrNotExist) {
				file = filepath.Join(dir, n)
				break
			}
		}
		if file == "" {
			return nil, fmt.Errorf(
				"registry credentials: %q has none of the files %s",
				dir,
				strings.Join(configNames, ", "),
			)
		}
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("registry credentials: %w", err)
	}
	defer f.Close()
	content, err := readBounded(f, maxConfig)
	if err != nil {
		return nil, fmt.Errorf("registry credentials %q: %w", file, err)
	}
	trimmed := bytes.TrimSpace(content)
	if filepath.Base(file) == ".dockercfg" {
		trimmed = append(append([]byte(`{"auths":`), trimmed...), '}')
	}
	parsed, err := config.LoadFromReader(bytes.NewReader(trimmed))
	if err != nil { // its text may contain a part of the content
		return nil, fmt.Errorf(
			"registry credentials: %q is not what docker writes into its config.json",
			file,
		)
	}
	return parsed, nil
}

// credentialOf finds the file's credential for the repository: the entry that names most of its
// path, as Kubernetes and podman do; an entry for the registry; or one with a wildcard in its host.
func credentialOf(file *configfile.ConfigFile, target authn.Resource) (types.AuthConfig, error) {
	var empty types.AuthConfig
	host := target.RegistryStr()
	for key := target.String(); key != host && strings.Contains(key, "/"); key = path.Dir(key) {
		if found, there := file.AuthConfigs[key]; there {
			found.ServerAddress = ""
			return found, nil
		}
	}
	if host == name.DefaultRegistry {
		host = authn.DefaultAuthKey
	}
	if file.CredentialsStore != "" || file.CredentialHelpers[host] != "" {
		found, err := file.GetAuthConfig(host)
		found.ServerAddress = ""
		if err != nil || found != empty {
			return found, err
		}
	}
	for _, key := range []string{host, "https://" + host, "http://" + host,
		"https://" + host + "/v1/", "https://" + host + "/v2/"} {
		if found, there := file.AuthConfigs[key]; there {
			found.ServerAddress = ""
			return found, nil
		}
	}
	best := ""
	for key := range file.AuthConfigs {
		if strings.Contains(key, "*") && len(key) > len(best) && globMatches(key, target.String()) {
			best = key
		}
	}
	found := file.AuthConfigs[best]
	found.ServerAddress = ""
	return found, nil
}

// globMatches tells whether the key of a pull secret, whose host may have wildcards, covers the
// repository: each label of the host by itself, then the path by its beginning.
func globMatches(key, repository string) bool {
	key = strings.TrimPrefix(strings.TrimPrefix(key, "https://"), "http://")
	keyHost, keyPath, _ := strings.Cut(key, "/")
	host, rest, _ := strings.Cut(repository, "/")
	globs, labels := strings.Split(keyHost, "."), strings.Split(host, ".")
	if len(globs) != len(labels) {
		return false
	}
	for i, g := range globs {
		if ok, err := path.Match(g, labels[i]); err != nil || !ok {
			return false
		}
	}
	keyPath = strings.TrimSuffix(keyPath, "/")
	return keyPath == "" || rest == keyPath || strings.HasPrefix(rest, keyPath+"/")
}
