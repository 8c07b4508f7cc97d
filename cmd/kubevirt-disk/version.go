package main

import (
	"cmp"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/status"
)

// buildInfo describes this binary by values from the linker, or else by those that the Go tool
// recorded.
func buildInfo() status.Build {
	b := status.Build{
		Version:   version,
		Commit:    commit,
		GoVersion: runtime.Version(),
		Platform:  runtime.GOOS + "/" + runtime.GOARCH,
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		if b.Version == "" && info.Main.Version != "(devel)" {
			b.Version = info.Main.Version
		}
		b.Commit = cmp.Or(b.Commit, recordedCommit(info.Settings))
	}
	b.Version = cmp.Or(b.Version, "dev")
	b.Commit = cmp.Or(b.Commit, "unknown")
	return b
}

func recordedCommit(settings []debug.BuildSetting) string {
	revision, dirty := "", ""
	for _, s := range settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "-dirty"
		}
	}
	if revision == "" {
		return ""
	}
	return revision + dirty
}

func (a *app) versionCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version, the commit, and what the binary was built with",
		Args:  usageArgs(noArgs),
		RunE: running(func(*cobra.Command, []string) error {
			b := buildInfo()
			if asJSON {
				return console.WriteJSON(a.stdout, b)
			}
			_, err := io.WriteString(a.stdout, versionText(b))
			return err
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func versionText(b status.Build) string {
	return fmt.Sprintf("kubevirt-disk %s\ncommit   %s\ngo       %s\nplatform %s\n", b.Version,
		b.Commit, b.GoVersion, b.Platform)
}
