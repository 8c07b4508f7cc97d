package main

import (
	"errors"
	"io/fs"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/internal/cli/console"
)

// standardStream is the argument for standard input or output.
const standardStream = "-"

// checkSource refuses to read an image from standard input. A file named - is ./-.
func checkSource(path string) error {
	if path == standardStream {
		return errors.New("an image cannot be read from standard input, as its parts are read in " +
			"any order: " +
			`write it into a file first, and name that ("./-" is a file of that name)`)
	}
	return nil
}

// checkStdout refuses to write a disk to a terminal.
func (a *app) checkStdout() error {
	if console.IsTerminal(a.stdout) {
		return errors.New("standard output is a terminal, which a disk would garble: " +
			`redirect it (">disk.raw", "| ssh ...")`)
	}
	return nil
}

func isDirectory(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// imageArgs is usageArgs for commands that take file names. It refuses a credential instead of
// repeating it as a file name.
func imageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return usageArgs(func(cmd *cobra.Command, args []string) error {
		for _, arg := range args {
			name, _, ok := strings.Cut(arg, "=")
			if _, err := os.Lstat(arg); ok && looksLikeCredential(name) && errors.Is(err,
				fs.ErrNotExist) {
				return errors.New("a credential is not an argument") // usageArgs explains it
			}
		}
		return check(cmd, args)
	})
}
