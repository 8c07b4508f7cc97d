package main

import (
	"slices"

	"kubevirt.io/disk/internal/cli/xml"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/libvirt"
)

// imageExtensions are the extensions of image files, without the dot.
var imageExtensions = []string{"qcow2", "raw", "img", "iso"}

// choices are the values that a shell completes for flags with a few fixed values that are no
// settings.
var choices = map[string][]string{
	keyFormat:        texts(image.FormatRaw, image.FormatQcow2),
	flagTargetFormat: targetFormats,
	flagCompress:     compressions,

	"bus": texts(libvirt.BusVirtio, libvirt.BusSCSI, libvirt.BusSATA,
		libvirt.BusUSB),
	"device": texts(libvirt.KindDisk, libvirt.KindLUN),
	"cache": texts(libvirt.CacheDefault, libvirt.CacheNone, libvirt.CacheWriteback,
		libvirt.CacheWritethrough,
		libvirt.CacheDirectsync, libvirt.CacheUnsafe),
	"io":            texts(libvirt.IOThreads, libvirt.IONative, libvirt.IOUring),
	"discard":       texts(libvirt.DiscardUnmap, libvirt.DiscardIgnore),
	"detect-zeroes": texts(libvirt.ZeroesOff, libvirt.ZeroesOn, libvirt.ZeroesUnmap),
	"error-policy": texts(libvirt.ErrorStop, libvirt.ErrorReport, libvirt.ErrorIgnore,
		libvirt.ErrorNoSpace),
	"rerror-policy": texts(libvirt.ErrorStop, libvirt.ErrorReport, libvirt.ErrorIgnore),
}

// fileFlags take the name of a file, and are no settings.
var fileFlags = []string{keyKernel, keyInitrd, xml.FlagFile, xml.FlagOverlay,
	"token-file", "ca", "cert", "key"}

func texts[T ~string](values ...T) []string {
	all := make([]string, len(values))
	for i, v := range values {
		all[i] = string(v)
	}
	return all
}

// completeValues tells the shell what the flags and arguments of all commands can be.
func completeValues(root *cobra.Command) {
	for _, cmd := range root.Commands() {
		if slices.Contains([]string{"completion", "help"}, cmd.Name()) {
			continue
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			// It fails if it is called twice for a flag.
			_ = cmd.RegisterFlagCompletionFunc(f.Name, completionOf(f.Name))
		})
		if cmd.ValidArgsFunction == nil {
			cmd.ValidArgsFunction = cobra.NoFileCompletions
		}
	}
}

func completionOf(flag string) cobra.CompletionFunc {
	row, _ := settings.Find(knownSettings(), flag)
	switch values := slices.Concat(row.Choices, choices[flag]); {
	case values != nil:
		return cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
	case row.Kind == settings.KindDir:
		return cobra.FixedCompletions(nil, cobra.ShellCompDirectiveFilterDirs)
	case row.Kind == settings.KindFile || slices.Contains(fileFlags, flag):
		return cobra.FixedCompletions(nil, cobra.ShellCompDirectiveDefault)
	case flag == settings.FlagConfig:
		return cobra.FixedCompletions([]string{"yaml", "yml"},
			cobra.ShellCompDirectiveFilterFileExt)
	}
	return cobra.NoFileCompletions
}

// completeImages is for commands whose arguments are images.
func completeImages(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return imageExtensions, cobra.ShellCompDirectiveFilterFileExt
}

// completeConvert completes the image, and the file that convert makes from it.
func completeConvert(_ *cobra.Command, args []string, _ string) ([]string,
	cobra.ShellCompDirective) {
	switch len(args) {
	case 0:
		return imageExtensions, cobra.ShellCompDirectiveFilterFileExt
	case 1:
		return []string{"raw", "img", "qcow2"}, cobra.ShellCompDirectiveFilterFileExt
	}
	return nil, cobra.ShellCompDirectiveNoFileComp
}
