package main

import (
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"kubevirt.io/disk/internal/cli/settings"
)

// helpWidth is the length of the longest line of the help, in columns.
const helpWidth = 100

// formatsHelp describes the files that the commands for disks of any origin take.
const formatsHelp = `A disk is raw, qcow2, VHDX, VHD, VDI or VMDK, plain or in gzip, xz, zstd,
bzip2, or a tar archive with no other disk (OVA). The content decides.`

// examples are the examples in the help of each command. They work for a person who has read
// nothing else.
var examples = map[string]string{
	"serve": `  kubevirt-disk serve fedora.qcow2
  kubevirt-disk serve fedora.qcow2 -- nbdinfo {uri}
  kubevirt-disk serve fedora.qcow2 --fork --pid-file ./pid
  kubevirt-disk serve --disk-dir ./images --work-dir ./work --ready-file ./ready
  kubevirt-disk serve --image registry.example.com/vm/fedora:42`,
	"inspect": `  kubevirt-disk inspect fedora.qcow2
  kubevirt-disk inspect ./images`,
	"convert": `  kubevirt-disk convert fedora.qcow2 fedora.raw
  kubevirt-disk convert fedora.raw small.qcow2
  kubevirt-disk convert fedora.qcow2 /dev/vg/fedora`,
	"adapt": `  kubevirt-disk adapt docker.io/library/nginx:1.29 --to ./nginx
  kubevirt-disk adapt oci:./image --to ./machine --env LANG=C.UTF-8 -- /bin/sh -l`,
	"xml": `  kubevirt-disk xml --status-url http://10.0.0.5:9260 --domain web >disk.xml`,
	"hook": `  kubevirt-disk hook --check vm.yaml
  kubevirt-disk hook --check vm.yaml --check another.yaml`,
	"healthcheck": `  kubevirt-disk healthcheck
  kubevirt-disk healthcheck --ready-file ./ready`,
	"provide": `  kubevirt-disk provide fedora.qcow2 --to /shared/disk`,
	"commit": `  kubevirt-disk commit 'nbd+unix:///vm.qcow2?socket=/run/disk/nbd.sock' \
    registry.example.com/vm/fedora:43 --onto registry.example.com/vm/fedora:42`,
	"pull": `  kubevirt-disk pull registry.example.com/vm/fedora:42 disk.img
  kubevirt-disk pull quay.io/containerdisks/fedora:42 /dev/vg/fedora`,
	"push": `  kubevirt-disk push --base=none fedora.qcow2 registry.example.com/vm/fedora:42
  kubevirt-disk push --base registry.example.com/kubevirt.io:disk root.qcow2 data.raw \
      registry.example.com/vm/fedora:42`,
	"sign":   `  kubevirt-disk sign registry.example.com/vm/fedora:42 --sign-key cosign.key`,
	"verify": `  kubevirt-disk verify registry.example.com/vm/fedora:42 --verify-key cosign.pub`,
	"key":    `  kubevirt-disk key generate`,
	"upload": `  kubevirt-disk upload fedora.qcow2 https://10.0.0.5:8443/volume/vm1 --ca ca.pem \
      --token-file token`,
	"handover": `  kubevirt-disk handover --lun 1 --to iqn.2017-01.io.kubevirt:node2 --for 5m
  kubevirt-disk handover --lun 1 --finish`,
	"ps": `  kubevirt-disk ps`,
	"sessions": `  kubevirt-disk sessions
  kubevirt-disk sessions --work-dir ./work`,
	"kick": `  kubevirt-disk kick --initiator iqn.2017-01.io.kubevirt:node1`,
	"snapshot": `  kubevirt-disk snapshot create fedora.qcow2 before-update
  kubevirt-disk snapshot list
  kubevirt-disk snapshot serve fedora.qcow2 before-update
  kubevirt-disk snapshot unserve fedora.qcow2 before-update
  kubevirt-disk snapshot revert fedora.qcow2 before-update
  kubevirt-disk snapshot delete fedora.qcow2 before-update`,
	"version": `  kubevirt-disk version`,
}

// wideHelp adds the examples, and breaks long lines of flags.
func wideHelp(root *cobra.Command) {
	for _, c := range root.Commands() {
		c.Example = examples[c.Name()]
		for _, sub := range c.Commands() {
			others := func(line string) bool { return !strings.Contains(line, sub.CommandPath()) }
			own := slices.DeleteFunc(strings.Split(c.Example, "\n"), others)
			sub.Example = strings.Join(own, "\n")
		}
	}
	wrapped := fmt.Sprintf(".FlagUsagesWrapped %d", helpWidth)
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), ".FlagUsages", wrapped))
}

// sectionHelp is --help of a command with very many settings. It lists the most common ones first.
// --help=all lists all, by section.
type sectionHelp struct {
	rows       []settings.Setting
	first      []string
	asked, all bool
}

func (h *sectionHelp) String() string   { return strconv.FormatBool(h.asked) }
func (h *sectionHelp) Type() string     { return "bool" } // Cobra insists on it
func (h *sectionHelp) IsBoolFlag() bool { return true }

// Set takes "all" in addition to the values of a switch.
func (h *sectionHelp) Set(text string) error {
	if text == "all" {
		h.asked, h.all = true, true
		return nil
	}
	asked, err := strconv.ParseBool(text)
	if err != nil {
		return errors.New("use --help or --help=all")
	}
	h.asked = asked
	return nil
}

// usage is Cobra's usage of the command, with the flags by section.
func (h *sectionHelp) usage(c *cobra.Command) error {
	_, err := fmt.Fprintf(c.OutOrStderr(), "Usage:\n  %s\n\nExamples:\n%s\n\n%s", c.UseLine(),
		c.Example, h.flags(c.Flags()))
	return err
}

// flags describes the flags of a command.
func (h *sectionHelp) flags(all *pflag.FlagSet) string {
	var b strings.Builder
	section := func(title string, keys ...string) {
		some := pflag.NewFlagSet("", pflag.ContinueOnError)
		some.SortFlags = false
		for _, key := range keys {
			some.AddFlag(all.Lookup(key))
		}
		fmt.Fprintf(&b, "%s:\n%s\n", title, some.FlagUsagesWrapped(helpWidth))
	}
	if !h.all {
		section("The flags that people use first", append(h.first, flagFork, flagPIDFile,
			settings.FlagConfig, "help")...)
		fmt.Fprintf(&b, "There are %d more. Use --help=all for all of them, by section:\n  %s\n",
			len(h.rows)-len(h.first), strings.Join(sectionsOf(h.rows), "\n  "))
		return b.String()
	}
	for _, title := range sectionsOf(h.rows) {
		in := settings.Only(h.rows, func(s settings.Setting) bool { return s.Section == title })
		section(title, slices.Collect(settings.Keys(in))...)
	}
	section("In the background", flagFork, flagPIDFile)
	section("All settings", settings.FlagConfig, "help")
	return strings.TrimSuffix(b.String(), "\n")
}

// sectionsOf are the titles of the sections of rows, in their order.
func sectionsOf(rows []settings.Setting) (titles []string) {
	for _, s := range rows {
		if !slices.Contains(titles, s.Section) {
			titles = append(titles, s.Section)
		}
	}
	return titles
}

// didYouMean completes a message about an unknown word with similar known ones.
func didYouMean(word, before string, known *cobra.Command) string {
	known.SuggestionsMinimumDistance = 2
	near := known.SuggestionsFor(word)
	if word == "" || len(near) == 0 { // each word begins with the empty one
		return ""
	}
	return fmt.Sprintf(" (did you mean %s%s?)", before, strings.Join(near, " or "+before))
}

// flagNames has the flags of a command as commands.
func flagNames(cmd *cobra.Command) *cobra.Command {
	return wordsAsCommands(func(yield func(string) bool) {
		cmd.Flags().VisitAll(func(f *pflag.Flag) { yield(f.Name) })
	})
}

// wordsAsCommands turns words into commands, so that Cobra finds the similar ones.
func wordsAsCommands(words iter.Seq[string]) *cobra.Command {
	names := &cobra.Command{}
	for word := range words {
		names.AddCommand(&cobra.Command{Use: word, Run: func(*cobra.Command, []string) {}})
	}
	return names
}
