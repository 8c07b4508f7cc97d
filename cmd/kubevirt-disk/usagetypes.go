package main

import (
	"bytes"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/daemon/options"
)

// usageTypeAnnotation is the prefix of annotations that say where a storage is mounted.
const usageTypeAnnotation = "kubevirt.io/storage.usage-type."

// usageTypePattern is what Kubernetes allows at the end of an annotation's name.
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
			settings.WithoutPath(err))
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

// addUsageType adds a type that the given setting names.
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
