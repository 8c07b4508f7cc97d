package main

import (
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/target"
)

// keyDisks is the key of the YAML file for the settings of single disks, by the names of their
// images.
const keyDisks = "disks"

// The keys of a disk that messages name.
const (
	keyFormat = "format"
	keySerial = "serial"
	keyNAA    = "naa"

	keyReadOnly = "read-only"
)

// maxLUN is the highest LUN of the flat addressing method, 14 bits (SAM-5 4.7.7).
const maxLUN = 1<<14 - 1

// diskOverrides are the settings of one disk in the file. A nil field is as for all disks.
type diskOverrides struct {
	source string // the place to change, for messages
	set    map[string]string
}

// diskKeys are the keys of a disk, each with the function that applies it.
var diskKeys = map[string]func(s *daemon.DiskSettings, value string) error{
	"lun": func(s *daemon.DiskSettings, value string) error {
		n, err := strconv.ParseUint(value, 10, 16)
		if err != nil || n < 1 || n > maxLUN {
			return fmt.Errorf("%q is not a LUN: use 1 to %d", value, maxLUN)
		}
		s.LUN = uint16(n)
		return nil
	},
	keyCopyMode: func(s *daemon.DiskSettings, value string) (err error) {
		s.CopyMode, err = instance.ParseCopyMode(value)
		return err
	},
	keyAccessMode: func(s *daemon.DiskSettings, value string) (err error) {
		s.AccessMode, err = target.ParseAccessMode(value)
		return err
	},
	keyFormat: func(s *daemon.DiskSettings, value string) (err error) {
		s.Format, err = image.ParseFormat(value)
		if err == nil && value == "" {
			err = errors.New("is empty: use raw or qcow2, or leave it out")
		}
		return err
	},
	keySize: func(s *daemon.DiskSettings, value string) (err error) {
		s.Size, err = parseSize(value)
		return err
	},
	keySerial: func(s *daemon.DiskSettings, value string) error {
		for i := range len(value) {
			if value[i] <= ' ' || value[i] > '~' {
				return fmt.Errorf("%q is not a serial: use printable ASCII characters without "+
					"spaces",
					value)
			}
		}
		if value == "" || len(value) > 36 {
			return fmt.Errorf("%q is not a serial: use 1 to 36 characters", value)
		}
		s.Identity.Serial = value
		return nil
	},
	keyNAA: func(s *daemon.DiskSettings, value string) error {
		naa, err := hex.DecodeString(strings.TrimPrefix(strings.ToLower(value), "0x"))
		if err != nil || len(naa) != 8 || naa[0]>>4 != 3 {
			return fmt.Errorf("%q is not an NAA identifier: use 16 hexadecimal digits, of which "+
				"the first is 3", value)
		}
		s.Identity.NAA = [8]byte(naa)
		return nil
	},
	keyReadOnly: func(s *daemon.DiskSettings, value string) (err error) {
		s.ReadOnly, err = parseTruth(value)
		return err
	},
	keyUsageType: func(s *daemon.DiskSettings, value string) error {
		s.UsageType = value
		return checkUsageType(value)
	},
	"removable": func(s *daemon.DiskSettings, value string) (err error) {
		s.Removable, err = parseTruth(value)
		return err
	},
}

// commonDiskKeys are the settings for all disks that a single disk may override.
var commonDiskKeys = []string{keyCopyMode, keyAccessMode, keySize}

func parseTruth(value string) (bool, error) {
	v, err := strconv.ParseBool(value)
	if err != nil {
		return false, fmt.Errorf("%q is neither true nor false", value)
	}
	return v, nil
}

// sizeUnit is a number of bytes with the units of qemu-img, where 20G is 20 GiB, or with those of
// Kubernetes, where 20Gi is.
var sizeUnit = regexp.MustCompile(`^([0-9]+)(?:([kKMGTP])i?)?$`)

// parseSize reads the size of a disk in bytes.
func parseSize(text string) (int64, error) {
	n, err := parseBytes(text)
	if err == nil && n%disk.SectorSize != 0 {
		return 0, fmt.Errorf("%q is not a multiple of %d bytes: use K, M, G or T", text,
			disk.SectorSize)
	}
	return n, err
}

// parseBytes reads a number of bytes: 20G, 20Gi, 1073741824.
func parseBytes(text string) (int64, error) {
	if m := sizeUnit.FindStringSubmatch(text); m != nil {
		unit := int64(1) << (10 * (1 + strings.Index("KMGTP", strings.ToUpper(m[2]))))
		if m[2] == "" {
			unit = 1
		}
		n, err := strconv.ParseInt(m[1], 10, 64)
		if err == nil && n > 0 && n <= math.MaxInt64/unit {
			return n * unit, nil
		}
	}
	hint := ""
	if short := strings.TrimSuffix(text, "B"); sizeUnit.MatchString(short) {
		hint = fmt.Sprintf(": write %q", short)
	}
	return 0, fmt.Errorf("%q is not a size%s: use a number of bytes, or one with K, M, G or T "+
		"for KiB, MiB, GiB or TiB, as qemu-img does", text, hint)
}

// readDisks reads the value of keyDisks. It checks the keys; apply checks the values.
func readDisks(path string, n *yaml.Node) (map[string]diskOverrides, []string) {
	if n.Kind != yaml.MappingNode {
		return nil, []string{fmt.Sprintf("%q: line %d: %q holds settings by the names of images: "+
			"\"fedora.qcow2: {lun: 3}\"", path, n.Line, keyDisks)}
	}
	disks := map[string]diskOverrides{}
	var problems []string
	for i := 0; i+1 < len(n.Content); i += 2 {
		image, settings := n.Content[i], n.Content[i+1]
		complain := func(line int, format string, args ...any) {
			problems = append(problems,
				fmt.Sprintf("%q: line %d: %q: %s", path, line, image.Value,
					fmt.Sprintf(format, args...)))
		}
		if _, twice := disks[image.Value]; twice {
			complain(image.Line, "is set up twice")
			continue
		}
		if settings.Kind != yaml.MappingNode {
			complain(settings.Line, "want its settings as \"key: value\"")
			continue
		}
		d := diskOverrides{source: fmt.Sprintf("%q of %q in %q", keyDisks, image.Value, path),
			set: map[string]string{}}
		for j := 0; j+1 < len(settings.Content); j += 2 {
			key, value := settings.Content[j], settings.Content[j+1]
			_, twice := d.set[key.Value]
			switch {
			case diskKeys[key.Value] == nil:
				complain(key.Line, "%q is not a setting of a disk: use %s", key.Value,
					strings.Join(slices.Sorted(maps.Keys(diskKeys)), ", "))
			case twice:
				complain(key.Line, "%q is set twice", key.Value)
			case value.Kind != yaml.ScalarNode || isNull(value):
				complain(key.Line, "%q takes a single value", key.Value)
			default:
				d.set[key.Value] = value.Value
			}
		}
		disks[image.Value] = d
	}
	return disks, problems
}

// apply puts the settings of the file into s.
func (d diskOverrides) apply(s *daemon.DiskSettings, p *problems.List) {
	for _, key := range slices.Sorted(maps.Keys(d.set)) {
		if err := diskKeys[key](s, strings.TrimSpace(d.set[key])); err != nil {
			p.Add(fmt.Sprintf("%s, key %q", d.source, key), "%v", err)
		}
		if key == keyCopyMode {
			s.CopyModeSource = fmt.Sprintf("%s, key %q", d.source, key)
		}
	}
}

// single returns the disks that have settings of their own in the file. For every other setting
// they have the common one.
func (l *loader) single(
	common daemon.DiskSettings, types daemon.UsageTypes,
) map[string]daemon.SingleDisk {
	all := make(map[string]daemon.SingleDisk, len(l.disks))
	for _, name := range slices.Sorted(maps.Keys(l.disks)) {
		d := l.disks[name]
		_, format := d.set[keyFormat]
		single := daemon.SingleDisk{
			DiskSettings: common, FormatOnly: format && len(d.set) == 1, Source: d.source,
		}
		d.apply(&single.DiskSettings, &l.problems)
		if name := single.UsageType; checkUsageType(name) == nil {
			if _, err := types.Dir(name); err != nil {
				l.problems.Add(fmt.Sprintf("%s, key %q", d.source, keyUsageType), "%v", err)
			}
		}
		all[name] = single
	}
	return all
}
