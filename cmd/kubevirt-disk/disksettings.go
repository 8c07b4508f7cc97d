package main

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/serving"
)

// The keys of a disk that appear in messages.
const (
	keyFormat = "format"

	keyReadOnly = "read-only"
)

func parseLUN(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n < 1 || n > serving.MaxNumber {
		return 0, fmt.Errorf("%q is not a LUN: use 1 to %d", text, serving.MaxNumber)
	}
	return uint16(n), nil
}

func parseFormat(text string) (image.Format, error) {
	if text == "" {
		return "", errors.New("is empty: use raw or qcow2, or leave it out")
	}
	return image.ParseFormat(text)
}

func parseSerial(text string) (string, error) {
	for i := range len(text) {
		if text[i] <= ' ' || text[i] > '~' {
			return "", fmt.Errorf("%q is not a serial: use printable ASCII characters without "+
				"spaces", text)
		}
	}
	if text == "" || len(text) > 36 {
		return "", fmt.Errorf("%q is not a serial: use 1 to 36 characters", text)
	}
	return text, nil
}

func parseNAA(text string) ([8]byte, error) {
	naa, err := hex.DecodeString(strings.TrimPrefix(strings.ToLower(text), "0x"))
	if err != nil || len(naa) != 8 || naa[0]>>4 != 3 {
		return [8]byte{}, fmt.Errorf("%q is not an NAA identifier: use 16 hexadecimal digits, of "+
			"which the first is 3", text)
	}
	return [8]byte(naa), nil
}

func parseUsageType(text string) (string, error) { return text, checkUsageType(text) }

// sizeUnit is a number of bytes with a unit of qemu-img, where 20G is 20 GiB, or of Kubernetes,
// where the same is 20Gi.
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

// parseBlockSize reads the length of a logical block in bytes.
func parseBlockSize(text string) (int, error) {
	switch text {
	case "512":
		return disk.SectorSize, nil
	case "4096":
		return disk.LongBlock, nil
	}
	return 0, fmt.Errorf("%q is not the length of a logical block: use %d or %d", text,
		disk.SectorSize, disk.LongBlock)
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
	if short, ok := strings.CutSuffix(text, "B"); ok && sizeUnit.MatchString(short) {
		hint = fmt.Sprintf(": write %q", short)
	}
	return 0, fmt.Errorf("%q is not a size%s: use a number of bytes, or one with K, M, G or T "+
		"for KiB, MiB, GiB or TiB, as qemu-img does", text, hint)
}

// applySingle puts the settings of the file into s.
func applySingle(d settings.Single, s *options.DiskSettings, p *problems.List) {
	c := newConfig()
	c.Settings.Disk = *s
	rows := c.diskSettings()
	for _, key := range slices.Sorted(maps.Keys(d.Set)) {
		source := fmt.Sprintf("%s, key %q", d.Source, key)
		row, _ := settings.Find(rows, key)
		if err := row.To.Set([]string{strings.TrimSpace(d.Set[key])}); err != nil {
			p.Add(source, "%v", err)
		}
		if key == keyCopyMode {
			c.Settings.Disk.CopyModeSource = source
		}
	}
	*s = c.Settings.Disk
}

// single returns the disks with settings of their own in the file. Their other settings are the
// common ones.
func (l loader) single(
	common options.DiskSettings, types options.UsageTypes,
) map[string]options.SingleDisk {
	all := make(map[string]options.SingleDisk, len(l.Disks))
	for _, name := range slices.Sorted(maps.Keys(l.Disks)) {
		d := l.Disks[name]
		_, format := d.Set[keyFormat]
		single := options.SingleDisk{
			DiskSettings: common, FormatOnly: format && len(d.Set) == 1, Source: d.Source,
		}
		applySingle(d, &single.DiskSettings, &l.Problems)
		if name := single.UsageType; checkUsageType(name) == nil {
			if _, err := types.Dir(name); err != nil {
				l.Problems.Add(fmt.Sprintf("%s, key %q", d.Source, keyUsageType), "%v", err)
			}
		}
		all[name] = single
	}
	return all
}

// usageTypeAnnotation is the prefix of annotations that name the mount point of a storage.
const usageTypeAnnotation = "kubevirt.io/storage.usage-type."

// usageTypePattern is the part of an annotation's name that Kubernetes allows after the prefix.
var usageTypePattern = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,42}[A-Za-z0-9])?$`)

func checkUsageType(name string) error {
	if !usageTypePattern.MatchString(name) {
		return fmt.Errorf("%q is not the name of a usage type: use at most 44 letters, digits, "+
			"'-', '_' and '.', with a letter or digit at both ends", name)
	}
	return nil
}

// usageTypes returns the types from the settings and from the file of the pod's annotations.
func (l loader) usageTypes(annotations string) options.UsageTypes {
	types := options.UsageTypes{}
	for _, one := range l.List(keyUsageType) {
		name, dir, ok := strings.Cut(one, "=")
		if !ok {
			l.Problems.Add(l.Name(keyUsageType), "%q is not a usage type: write "+
				"NAME=DIRECTORY", one)
			continue
		}
		l.addUsageType(types, keyUsageType, name, dir)
	}
	if annotations == "" {
		return types
	}
	text, err := l.Read(annotations)
	if err != nil {
		l.Problems.Add(l.Name(keyPodAnnotations), "%q cannot be read: %v", annotations,
			osfile.WithoutPath(err))
		return types
	}
	all, err := parseAnnotations(text)
	if err != nil {
		l.Problems.Add(l.Name(keyPodAnnotations), "%q: %v", annotations, err)
	}
	for _, key := range slices.Sorted(maps.Keys(all)) {
		if name, ok := strings.CutPrefix(key, usageTypeAnnotation); ok {
			l.addUsageType(types, keyPodAnnotations, name, all[key])
		}
	}
	return types
}

// addUsageType adds a type from the setting with the given key.
func (l loader) addUsageType(types options.UsageTypes, key, name, dir string) {
	name, dir = strings.TrimSpace(name), strings.TrimSpace(dir)
	if err := checkUsageType(name); err != nil {
		l.Problems.Add(l.Name(key), "%v", err)
		return
	}
	if dir == "" {
		l.Problems.Add(l.Name(key), "usage type %q has no directory: write %s=DIRECTORY", name,
			name)
		return
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		l.Problems.Add(l.Name(key), "usage type %q: %v", name, err)
		return
	}
	if other, twice := types[name]; twice && other != dir {
		l.Problems.Add(l.Name(key), "usage type %q has two directories, %q and %q: name one", name,
			other, dir)
		return
	}
	types[name] = dir
}

// parseAnnotations reads a file of the downward API: lines of a key, an equals sign and a value
// quoted as in Go. With an error, it returns the lines before the wrong one.
func parseAnnotations(text []byte) (map[string]string, error) {
	all := map[string]string{}
	number := 0
	for line := range bytes.Lines(text) {
		number++
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			continue
		}
		key, quoted, ok := strings.Cut(string(line), "=")
		if !ok {
			return all, fmt.Errorf("line %d: want key=\"value\", as the downward API writes "+
				"metadata.annotations", number)
		}
		value, err := strconv.Unquote(quoted)
		if err != nil {
			return all, fmt.Errorf("line %d: the value of %q is not in quotes, as the downward "+
				"API writes it", number, key)
		}
		all[key] = value
	}
	return all, nil
}
