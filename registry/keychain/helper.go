package keychain

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"time"

	"github.com/docker/docker-credential-helpers/client"
	"github.com/docker/docker-credential-helpers/credentials"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
)

// helperTime is how long a credential helper may take. Some first ask a cloud.
const helperTime = 20 * time.Second

// tokenUser is the user name by which a helper says that the secret is an identity token.
const tokenUser = "<token>"

// helperKeys are the names under which a registry's credential may be stored, docker's first:
// docker and podman have different names for Docker Hub. key is the name in the file, if it has
// one.
func helperKeys(host, key string) []string {
	keys := []string{host}
	if hubName(host) == name.DefaultRegistry {
		keys = []string{authn.DefaultAuthKey, "docker.io"}
	}
	if key != "" {
		keys = append(keys, key)
	}
	return keys
}

// askHelper asks the helper for the first credential that it has under one of the keys. Zero: it
// has none. The error does not contain the helper's output, which may be a secret.
func askHelper(ctx context.Context, helper string, keys []string) (authn.AuthConfig, error) {
	ctx, cancel := context.WithTimeout(ctx, helperTime)
	defer cancel()
	asked := map[string]bool{}
	for _, key := range keys {
		if asked[key] {
			continue
		}
		asked[key] = true
		p := &helperProgram{ctx: ctx}
		found, err := client.Get(func(args ...string) client.Program {
			p.cmd = exec.CommandContext(ctx, "docker-credential-"+helper, args...)
			p.cmd.WaitDelay = time.Second
			return p
		}, key)
		switch {
		case credentials.IsErrCredentialsNotFound(err):
		case p.err != nil:
			return authn.AuthConfig{}, p.err
		case err != nil:
			return authn.AuthConfig{}, errors.New("its answer is no credential")
		case found.Username == tokenUser && found.Secret != "":
			return authn.AuthConfig{IdentityToken: found.Secret}, nil
		case found.Username != "" || found.Secret != "":
			return authn.AuthConfig{Username: found.Username, Password: found.Secret}, nil
		}
	}
	return authn.AuthConfig{}, nil
}

// helperProgram is one run of a helper.
type helperProgram struct {
	ctx context.Context
	cmd *exec.Cmd
	err error
}

func (p *helperProgram) Input(in io.Reader) { p.cmd.Stdin = in }

func (p *helperProgram) Output() ([]byte, error) {
	out, err := p.cmd.Output()
	if p.err = err; err != nil && p.ctx.Err() != nil {
		p.err = fmt.Errorf("it has not answered within %s", helperTime)
	}
	return out, err
}
