package main

import (
	"github.com/spf13/pflag"

	"kubevirt.io/disk/libvirt"
)

const (
	flagFile    = "file"
	flagOverlay = "overlay"
)

// xmlFile are the flags of xml for an image in a local file.
type xmlFile struct {
	path, overlay string
	copyMode      string
}

func (f *xmlFile) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.path, flagFile, "",
		"`path` of an image on the domain's machine, .qcow2 or .raw, instead of a LUN")
	flags.StringVar(&f.overlay, flagOverlay, "",
		"`path` of the file over that image, or in mode clone of its copy")
	flags.StringVar(&f.copyMode, keyCopyMode, "",
		"what the overlay stores: `mode` none, copy-on-write, copy-on-read or clone (default "+
			"copy-on-write with --overlay, else none)")
}

// isGiven reports whether the flags are about a file.
func (f *xmlFile) isGiven(flags *pflag.FlagSet) bool {
	return flags.Changed(flagFile) || flags.Changed(flagOverlay) || flags.Changed(keyCopyMode)
}

// fileDocument returns the element for an image in a local file.
func (f *xmlFlags) fileDocument(l loader) (string, error) {
	for _, flag := range []string{flagStatusURL, flagHost, flagLUN, flagChapUsername, flagInitiator,
		flagDomain, keyTargetName, keyPort,
		flagNBD, flagExport, flagTLS, flagReconnect, "secret", "secret-usage", "secret-uuid"} {
		if l.Flags.Changed(flag) {
			l.Problems.Add("--"+flag, "is about a LUN: leave it out, or leave out --%s, --%s and "+
				"--%s", flagFile, flagOverlay, keyCopyMode)
		}
	}
	file := libvirt.File{Path: f.file.path, Overlay: f.file.overlay,
		CopyMode: libvirt.CopyMode(f.file.copyMode), ReadOnly: f.readOnly,
		AccessMode: libvirt.AccessMode(l.Text(keyAccessMode)), Serial: f.serial, WWN: f.wwn}
	if file.CopyMode == "" && file.Overlay != "" {
		file.CopyMode = libvirt.CopyOnWrite
	}
	if err := l.Problems.Err(); err != nil {
		return "", err
	}
	text, err := file.DiskXML(f.device())
	return text, l.explainFields(err)
}
