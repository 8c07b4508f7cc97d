package transport

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

// keychain finds the credential for a repository: in the given file, or else where docker, podman
// and the kubelet keep theirs.
type keychain struct {
	file string // "": where the others look
	own  Credential
	host string // of the registry that own is for
	warn func(text string)

	warned sync.Map // what warn was called with; each once
}

// Resolve is what go-containerregistry calls. The result looks the credential up again when it is
// old.
func (k *keychain) Resolve(target authn.Resource) (authn.Authenticator, error) {
	return k.ResolveContext(context.Background(), target)
}

// ResolveContext is Resolve for a caller that may give up.
func (k *keychain) ResolveContext(ctx context.Context,
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

// lookup finds the credential for a repository. None is no error, because public images need none.
// Neither is a place, an entry or a helper that cannot be used: the user is told, and if the
// credential is missed, the registry says so. An error is a named file that cannot be read.
func (k *keychain) lookup(ctx context.Context, target authn.Resource) (authn.AuthConfig, error) {
	if k.own != (Credential{}) && target.RegistryStr() == k.host {
		return authn.AuthConfig{Username: k.own.Username, Password: k.own.Password}, nil
	}
	if k.file != "" {
		file, err := readConfig(k.file)
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

// problem tells the user once about something that cannot be used.
func (k *keychain) problem(err error) {
	if _, told := k.warned.LoadOrStore(err.Error(), true); !told {
		k.warn(err.Error())
	}
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
