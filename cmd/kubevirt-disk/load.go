package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"kubevirt.io/disk/internal/problems"
)

// loader finds the value and the source of each setting. So an error can name the place to change.
type loader struct {
	flags    *pflag.FlagSet
	env      map[string]string // key to the variable that sets it
	defaults map[string]string // by key
	file     string
	values   map[string]any // of the file, by key: a string, or a list of them
	read     fileReader
	disks    map[string]diskOverrides // by image; only from the file
	problems problems.List
}

// load reads the given settings (or all, without keys) from parsed flags, the environment and the
// file. It collects the mistakes, so that a person sees all of them at once.
func load(flags *pflag.FlagSet, keys ...string) *loader {
	return loadBy(readBounded, flags, keys...)
}

// loadBy is load with another function to read files.
func loadBy(read fileReader, flags *pflag.FlagSet, keys ...string) *loader {
	l := &loader{flags: flags, env: map[string]string{}, defaults: map[string]string{}, read: read}
	for _, s := range selectSettings(keys) {
		l.defaults[s.key] = s.def
		if name := l.pickEnv(s, flags.Lookup(s.key).Changed); name != "" {
			l.env[s.key] = name
		}
	}
	l.readFile()
	for _, s := range selectSettings(keys) {
		if source := l.source(s.key); source != "" && !s.empty && l.isEmpty(s.key) {
			l.problems.Add(source, "is empty: give it a value or leave it out")
		}
	}
	return l
}

// pickEnv returns the variable that sets s, or "". If empty means nothing for a setting, an empty
// variable counts as unset: manifests and compose files pass variables on that way.
func (l *loader) pickEnv(s setting, decidedByFlag bool) string {
	picked, value := "", ""
	for _, name := range s.env {
		v, ok := os.LookupEnv(name)
		switch {
		case !ok || v == "" && !s.empty:
		case picked == "":
			picked, value = name, v
		case v != value && !decidedByFlag:
			l.problems.Add(picked+" and "+name, "disagree (%q and %q): set only one of them", value,
				v)
		}
	}
	return picked
}

func (l *loader) readFile() {
	source := "--" + flagConfig
	path, err := l.flags.GetString(flagConfig)
	if err != nil || path == "" && !l.flags.Changed(flagConfig) {
		source = envConfig
		path = os.Getenv(envConfig)
		if path == "" {
			return
		}
	}
	if path == "" {
		l.problems.Add(source, "is empty: name a file or leave it out")
		return
	}
	l.file = path
	values, disks, problems := readConfigFile(path, l.read)
	l.disks = disks
	for _, p := range problems {
		l.problems.Add(source, "%s", p)
	}
	for _, s := range provideSettings {
		if _, set := values[s.key]; set && l.flags.Lookup(s.key) == nil {
			l.problems.Add(source, "%q: %q is a setting of provide, and not of this command", path,
				s.key)
		}
	}
	l.values = values
}

// source names what set key: a flag, a variable, or a key of the file. "" means the default.
func (l *loader) source(key string) string {
	switch {
	case l.flags.Changed(key):
		return "--" + key
	case l.env[key] != "":
		return l.env[key]
	case l.values[key] != nil:
		return fmt.Sprintf("%q in %q", key, l.file)
	}
	return ""
}

// name is source for messages that may also be about the default.
func (l *loader) name(key string) string {
	if source := l.source(key); source != "" {
		return source
	}
	return "--" + key
}

func (l *loader) isEmpty(key string) bool {
	if selectSettings([]string{key})[0].kind == kindLines {
		return len(l.lines(key)) == 0
	}
	return len(l.list(key)) == 0
}

func (l *loader) text(key string) string {
	return strings.TrimSpace(strings.Join(l.given(key), ","))
}

// given returns the value of a setting as it was written: of the flag, else the variable, else the
// file, else the default.
func (l *loader) given(key string) []string {
	switch {
	case l.flags.Changed(key):
		flag := l.flags.Lookup(key)
		if list, ok := flag.Value.(pflag.SliceValue); ok {
			return list.GetSlice()
		}
		return []string{flag.Value.String()}
	case l.env[key] != "":
		return []string{os.Getenv(l.env[key])}
	}
	switch v := l.values[key].(type) {
	case nil:
		return []string{l.defaults[key]}
	case []string:
		return v
	default:
		return []string{fmt.Sprint(v)}
	}
}

// list returns the elements of a repeatable setting. Each value may hold several, separated by
// commas.
func (l *loader) list(key string) []string {
	var all []string
	for _, e := range l.given(key) {
		for _, part := range strings.Split(e, ",") {
			if part = strings.TrimSpace(part); part != "" {
				all = append(all, part)
			}
		}
	}
	return all
}
