package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/registry/signature"
)

const (
	flagSignKey = "sign-key"

	// envSignPassword is cosign's name for it.
	envSignPassword = "COSIGN_PASSWORD"
)

// addSignKey adds the flag for the key that signs what is pushed.
func addSignKey(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, flagSignKey, "", "PEM `file` with the private key that signs the "+
		"image as cosign does: cosign's own, whose password is in "+envSignPassword+" or in the "+
		"file "+envSignPassword+"_FILE, or a plain one")
}

// readSignKey reads the key that signs. It returns nil if file is "". No error shows a secret.
func readSignKey(file string) (*signature.PrivateKey, error) {
	if file == "" {
		return nil, nil
	}
	text, err := settings.ReadBounded(file)
	if err != nil {
		return nil, fmt.Errorf("--%s: %w", flagSignKey, err)
	}
	password := ""
	if signature.Encrypted(text) {
		if password, err = secretOf(envSignPassword); err != nil {
			return nil, err
		}
		_, empty := os.LookupEnv(envSignPassword)
		if password == "" && !empty && os.Getenv(envSignPassword+"_FILE") == "" {
			err = errors.New("it is encrypted: give its password in " + envSignPassword +
				", or in a file that " + envSignPassword + "_FILE names")
		}
	}
	var key *signature.PrivateKey
	if err == nil {
		key, err = signature.ParsePrivateKey(text, []byte(password))
	}
	if err != nil {
		return nil, fmt.Errorf("--%s: %q: %w", flagSignKey, file, err)
	}
	return key, nil
}
