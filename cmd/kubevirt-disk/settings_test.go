package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/testtool"
)

// TestEveryFlagIsInTheDocs compares the table in docs/configuration.md with the settings: each flag
// with its variables and its default, in the section in which the help has it, and nothing else.
func TestEveryFlagIsInTheDocs(t *testing.T) {
	text := testtool.Must(os.ReadFile(filepath.Join("..", "..", "docs", "configuration.md")))(t)
	flags, variables := regexp.MustCompile("`--([a-z-]+)`"), regexp.MustCompile("`([A-Z_]+)`")
	words := func(in string, of *regexp.Regexp) (all []string) {
		for _, m := range of.FindAllStringSubmatch(in, -1) {
			all = append(all, m[1])
		}
		return all
	}
	known := newConfig().settings()
	missing := slices.Collect(settings.Keys(known))
	section, titles := "", []string(nil)
	for line := range strings.Lines(string(text)) {
		if title, ok := strings.CutPrefix(line, "### "); ok {
			section = strings.TrimSpace(title)
		}
		if !strings.HasPrefix(line, "| `--") {
			continue
		}
		if !slices.Contains(titles, section) {
			titles = append(titles, section)
		}
		columns := strings.Split(line, " | ")
		var want []string
		for _, key := range words(columns[0], flags) {
			row, ok := settings.Find(known, key)
			require.True(t, ok, "there is no flag --%s", key)
			require.Contains(t, missing, key, "--%s stands twice", key)
			missing = slices.DeleteFunc(missing, func(k string) bool { return k == key })
			want = append(want, row.Env...)
			require.Contains(t, columns[2], row.Default, "the default of --%s", key)
			require.Equal(t, row.Section, section, "the section of --%s", key)
		}
		require.Equal(t, want, words(columns[1], variables), columns[0])
	}
	require.Equal(t, sectionsOf(known), titles)
	for key := range settings.Keys(new(reach).settings()) { // on a page of their own
		missing = slices.DeleteFunc(missing, func(k string) bool { return k == key })
	}
	require.Empty(t, missing)
}

// TestHelpOfServe: --help has the settings that people use first, and says how many more there are.
// --help=all has each setting once, in its section.
func TestHelpOfServe(t *testing.T) {
	flags := regexp.MustCompile(`(?m)^(?:  -h,|     ) --([a-z-]+)`)
	listed := func(arg string) (names []string, text string) {
		stdout, _ := works(t, nil, "serve", arg)
		for _, m := range flags.FindAllStringSubmatch(stdout, -1) {
			names = append(names, m[1])
		}
		return names, stdout
	}
	rows := newConfig().settings()
	for _, arg := range []string{"--help", "-h"} {
		few, text := listed(arg)
		require.Equal(t, append(slices.Clone(firstSettings), flagFork, flagPIDFile,
			settings.FlagConfig, "help"), few)
		require.Contains(t, text, fmt.Sprintf("There are %d more.", len(rows)-len(firstSettings)))
		require.Contains(t, text, "--help=all")
	}
	all, text := listed("--help=all")
	require.Equal(t, append(slices.Collect(settings.Keys(rows)), flagFork, flagPIDFile,
		settings.FlagConfig, "help"), all)
	for _, title := range sectionsOf(rows) {
		require.Contains(t, text, "\n"+title+":\n")
	}
	fails(t, nil, exitUsage, "serve --help", "serve", "--help=some")
}

// TestEverySettingOfADiskIsShown looks for the settings of single disks where people look for them.
func TestEverySettingOfADiskIsShown(t *testing.T) {
	for _, path := range []string{"docs/configuration.md", "examples/config.yaml"} {
		text := testtool.Must(os.ReadFile(filepath.Join("..", "..", path)))(t)
		_, disks, ok := strings.Cut(string(text), "disks:\n")
		require.True(t, ok)
		for key := range settings.Keys(newConfig().diskSettings()) {
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
