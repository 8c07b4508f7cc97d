package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/spf13/cobra"
)

// standardStream is the argument that stands for standard input or output.
const standardStream = "-"

// checkSource refuses to read an image from standard input. A file of that name is ./-.
func checkSource(path string) error {
	if path == standardStream {
		return errors.New("an image cannot be read from standard input, as its parts are read in any order: " +
			`write it into a file first, and name that ("./-" is a file of that name)`)
	}
	return nil
}

func isDirectory(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// imageArgs is usageArgs for commands that take names of files: a credential is not taken for one, and so not repeated.
func imageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return usageArgs(func(cmd *cobra.Command, args []string) error {
		for _, arg := range args {
			name, _, ok := strings.Cut(arg, "=")
			if _, err := os.Lstat(arg); ok && looksLikeCredential(name) && errors.Is(err, fs.ErrNotExist) {
				return errors.New("a credential is no argument") // usageArgs says it better
			}
		}
		return check(cmd, args)
	})
}

// refusal lists what is wrong with images that a person has named, as one error.
type refusal struct {
	verb string // completes "2 images ..."
	all  []error
}

func (r *refusal) add(err error) { r.all = append(r.all, err) }

func (r *refusal) err() error {
	if len(r.all) == 0 {
		return nil
	}
	if len(r.all) == 1 {
		return r.all[0]
	}
	return fmt.Errorf("%d images %s:\n  %w", len(r.all), r.verb, indented{errors.Join(r.all...)})
}

// indented is an error of several lines below another one.
type indented struct{ error }

func (i indented) Error() string { return strings.ReplaceAll(i.error.Error(), "\n", "\n  ") }
func (i indented) Unwrap() error { return i.error }
