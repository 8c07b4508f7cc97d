package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/disk"
)

func (a *app) inspectCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "inspect IMAGE",
		Short: "Show what an image is, and whether it would be served",
		Long: `Validates an image as serve does, and shows its format, sizes, compression and backing files. Backing files are looked
for in the image's own directory.

Exit status 1: the image would not be served; the output says why.`,
		Args: usageArgs(cobra.ExactArgs(1)),
		RunE: running(func(_ *cobra.Command, args []string) error {
			info, err := disk.Inspect(args[0], disk.ImageOptions{})
			if err != nil {
				return err
			}
			if asJSON {
				err = writeJSON(a.stdout, info)
			} else {
				err = writeInfo(a.stdout, info)
			}
			if err == nil && !info.Servable {
				err = errSilent
			}
			return err
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// writeInfo prints what applies to the image, a line each.
func writeInfo(w io.Writer, info disk.ImageInfo) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	row := func(name, value string) { fmt.Fprintf(t, "%s\t%s\n", name, value) }
	row("image", strconv.Quote(info.Name))
	row("format", formatText(info.Format, info.Version))
	if info.Servable {
		row("virtual size", sizeText(info.VirtualSize))
		row("allocated size", sizeText(info.AllocatedSize))
	}
	row("file size", sizeText(info.FileSize))
	if info.ClusterSize > 0 {
		row("cluster size", sizeText(info.ClusterSize))
	}
	if info.Servable {
		row("compression", orNone(info.Compression))
		if len(info.BackingChain) == 0 {
			row("backing file", "none")
		}
		for _, b := range info.BackingChain {
			row("backing file", fmt.Sprintf("%q, %s, %s", b.Name, formatText(b.Format, b.Version), sizeText(b.VirtualSize)))
		}
		row("servable", "yes")
	} else {
		row("servable", "no: it "+info.Reason)
	}
	return t.Flush()
}

func formatText(f disk.Format, version int) string {
	switch {
	case f == "":
		return "unknown"
	case version > 0:
		return fmt.Sprintf("%s version %d", f, version)
	}
	return string(f)
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// sizeText is a size for people, with the exact number.
func sizeText(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d bytes", n)
	}
	return fmt.Sprintf("%s (%d bytes)", shortSize(n), n)
}

// shortSize is a size with three digits and a binary unit.
func shortSize(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, unit := float64(n)/1024, 0
	for v >= 1023.5 && unit < len(units)-1 {
		v, unit = v/1024, unit+1
	}
	decimals := 2
	switch {
	case v >= 100:
		decimals = 0
	case v >= 10:
		decimals = 1
	}
	text := strconv.FormatFloat(v, 'f', decimals, 64)
	if decimals > 0 {
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	return fmt.Sprintf("%s %ciB", text, units[unit])
}
