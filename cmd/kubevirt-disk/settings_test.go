package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestEveryFlagIsInTheDocs compares the table in docs/configuration.md with the settings: each flag
// with its variables and its default, and nothing else.
func TestEveryFlagIsInTheDocs(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "configuration.md"))
	require.NoError(t, err)
	flags, variables := regexp.MustCompile("`--([a-z-]+)`"), regexp.MustCompile("`([A-Z_]+)`")
	words := func(in string, of *regexp.Regexp) (all []string) {
		for _, m := range of.FindAllStringSubmatch(in, -1) {
			all = append(all, m[1])
		}
		return all
	}
	known := newConfig().settings()
	missing := slices.Collect(keysOf(known))
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "| `--") {
			continue
		}
		columns := strings.Split(line, " | ")
		var want []string
		for _, key := range words(columns[0], flags) {
			row, ok := find(known, key)
			require.True(t, ok, "there is no flag --%s", key)
			require.Contains(t, missing, key, "--%s stands twice", key)
			missing = slices.DeleteFunc(missing, func(k string) bool { return k == key })
			want = append(want, row.env...)
			require.Contains(t, columns[2], row.def, "the default of --%s", key)
		}
		require.Equal(t, want, words(columns[1], variables), columns[0])
	}
	for key := range keysOf(new(reach).settings()) { // on a page of their own
		missing = slices.DeleteFunc(missing, func(k string) bool { return k == key })
	}
	require.Empty(t, missing)
}

// TestEverySettingOfADiskIsShown looks for the settings of single disks where people look for them.
func TestEverySettingOfADiskIsShown(t *testing.T) {
	for _, path := range []string{"docs/configuration.md", "examples/config.yaml"} {
		text, err := os.ReadFile(filepath.Join("..", "..", path))
		require.NoError(t, err)
		_, disks, ok := strings.Cut(string(text), "disks:\n")
		require.True(t, ok)
		for key := range keysOf(newConfig().diskSettings()) {
			require.Contains(t, disks, key+": ", path)
		}
	}
}

// TestOneEmptyWord: an empty word is a word, also if it is the only one.
func TestOneEmptyWord(t *testing.T) {
	cleanEnv(t)
	c := mustConfig(t, "--container-image=r.example/web:1", "--entrypoint=/bin/echo", "--args=")
	require.Equal(t, []string{""}, c.Containers.Machine.Args)
	c = mustConfig(t, "--container-image=r.example/web:1", "--args=a\r\nb,\"c\"", "--args=[d]")
	require.Equal(t, []string{"a\r\nb,\"c\"", "[d]"}, c.Containers.Machine.Args)
}
