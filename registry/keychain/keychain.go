// Package keychain finds credentials for registries in the places of docker, podman, skopeo and the
// kubelet: files, a variable, and helper programs that the files name. A credential is never part
// of an error or of a warning.
package keychain

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
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

// Keychain finds the credential for a repository: Own for the registry Host, or else one in File,
// or in the usual places. Any number of goroutines may use it.
type Keychain struct {
	File string // of credentials, or a directory with one; "": the usual places
	Own  Credential
	Host string
	Warn func(text string) // called once for each thing that cannot be used

	warned sync.Map // what Warn was called with
}

// Check reports whether File can be read.
func (k *Keychain) Check() error {
	if k.File == "" {
		return nil
	}
	_, err := readConfig(k.File)
	return err
}

// For returns an authenticator for a repository, or for an address. It looks the credential up when
// it needs one, and again when the credential is old.
func (k *Keychain) For(target authn.Resource) authn.ContextAuthenticator {
	return &looked{keychain: k, target: target}
}

// Resolve is for go-containerregistry. Its result looks the credential up again when it is old.
func (k *Keychain) Resolve(target authn.Resource) (authn.Authenticator, error) {
	return k.ResolveContext(context.Background(), target)
}

// ResolveContext is Resolve with a context.
func (k *Keychain) ResolveContext(ctx context.Context,
	target authn.Resource) (authn.Authenticator, error) {
	a := &looked{keychain: k, target: target}
	if _, err := a.AuthorizationContext(ctx); err != nil {
		return nil, err
	}
	if *a.config == (authn.AuthConfig{}) {
		return authn.Anonymous, nil
	}
	return a, nil
}

// lookup finds the credential for a repository. No credential is no error, because public images
// need none. Nor is a place, an entry or a helper that cannot be used: the user gets a warning, and
// the registry an unauthenticated request. It is an error if the named file cannot be read.
func (k *Keychain) lookup(ctx context.Context, target authn.Resource) (authn.AuthConfig, error) {
	if k.Own != (Credential{}) && target.RegistryStr() == k.Host {
		return authn.AuthConfig{Username: k.Own.Username, Password: k.Own.Password}, nil
	}
	if k.File != "" {
		file, err := readConfig(k.File)
		if err != nil {
			return authn.AuthConfig{}, err
		}
		return file.credential(ctx, target, k.problem), nil
	}
	for _, place := range usualPlaces() {
		file, err := place.read()
		if err != nil {
			k.problem(fmt.Errorf("%w; going on without it", err))
			continue
		}
		if found := file.credential(ctx, target, k.problem); found != (authn.AuthConfig{}) {
			return found, nil
		}
	}
	return authn.AuthConfig{}, nil
}

// problem warns the user once of something that cannot be used.
func (k *Keychain) problem(err error) {
	if _, told := k.warned.LoadOrStore(err.Error(), true); !told {
		k.Warn(err.Error())
	}
}

// looked is a credential that is looked up again from time to time.
type looked struct {
	keychain *Keychain
	target   authn.Resource

	mu     sync.Mutex
	config *authn.AuthConfig // guarded by mu
	at     time.Time         // guarded by mu
}

func (a *looked) Authorization() (*authn.AuthConfig, error) {
	return a.AuthorizationContext(context.Background())
}

func (a *looked) AuthorizationContext(ctx context.Context) (*authn.AuthConfig, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.config == nil || time.Since(a.at) > credentialAge {
		found, err := a.keychain.lookup(ctx, a.target)
		if err != nil {
			return nil, err
		}
		a.config, a.at = &found, time.Now()
	}
	copied := *a.config
	return &copied, nil
}
