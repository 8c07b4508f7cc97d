package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"

	"kubevirt.io/disk/internal/problems"
)

// loader finds the value and the source of each setting. So an error can name the place to change.
// Viper knows which value wins, but not where it came from.
type loader struct {
	flags    *pflag.FlagSet
	viper    *viper.Viper
	env      map[string]string // key to the variable that sets it
	file     string
	values   map[string]any // of the file, by key: a string, or a list of them
	read     fileReader
	disks    map[string]diskOverrides // by image; only from the file
	problems problems.List
}

// load reads settings from parsed flags, the environment and the file into where they land. It
// collects the mistakes, so that a person sees all of them at once.
func load(flags *pflag.FlagSet, rows []setting) *loader {
	l := loadBy(readBounded, flags, rows)
	l.land(rows)
	return l
}

// loadBy finds settings, and reads files with the given function. Nothing lands yet.
func loadBy(read fileReader, flags *pflag.FlagSet, rows []setting) *loader {
	l := &loader{flags: flags, env: map[string]string{}, read: read,
		viper: viper.NewWithOptions(viper.KeyDelimiter("\n"))} // no key has parts
	l.viper.AllowEmptyEnv(true) // pickEnv leaves out what counts as unset
	for _, s := range rows {
		l.viper.SetDefault(s.key, s.def)
		flag := flags.Lookup(s.key)
		if list, ok := flag.Value.(pflag.SliceValue); ok && flag.Changed {
			// Viper would read the flag's CSV, and lose a list with one empty word.
			l.viper.Set(s.key, list.GetSlice())
		} else {
			_ = l.viper.BindPFlag(s.key, flag) // it fails without a flag
		}
		if name := l.pickEnv(s, flag.Changed); name != "" {
			l.env[s.key] = name
			_ = l.viper.BindEnv(s.key, name) // it fails without a key
		}
	}
	l.readFile()
	_ = l.viper.MergeConfigMap(l.values) // it never fails
	for _, s := range rows {
		if source := l.source(s.key); source != "" && !s.empty && len(l.given(s)) == 0 {
			l.problems.Add(source, "is empty: give it a value or leave it out")
		}
	}
	return l
}

// land puts values where they land. A setting that nobody sets and that has no default does not
// change its field.
func (l *loader) land(rows []setting) {
	for _, s := range rows {
		given := l.given(s)
		if s.to.set == nil || len(given) == 0 && !s.empty {
			continue
		}
		if len(given) == 0 {
			given = []string{""}
		}
		if err := s.to.set(given); err != nil {
			l.problems.AddFrom(l.name(s.key), err)
		}
	}
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
	flag := l.flags.Lookup(flagConfig)
	if flag == nil {
		return // a command without a file
	}
	source, path := "--"+flagConfig, flag.Value.String()
	if !flag.Changed {
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
	for _, s := range provideSettings(new(providing)) {
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

// given returns the elements of a setting's value. It is empty if there is none.
func (l *loader) given(s setting) []string {
	switch s.kind {
	case kindList:
		return l.list(s.key)
	case kindLines:
		return l.lines(s.key)
	}
	if text := l.text(s.key); text != "" {
		return []string{text}
	}
	return nil
}

// value is the text of a setting, or the texts of a list in the YAML file or of a repeated flag.
func (l *loader) value(key string) (text string, list []string) {
	if list, ok := l.viper.Get(key).([]string); ok {
		return strings.Join(list, ","), list
	}
	return l.viper.GetString(key), nil
}

func (l *loader) text(key string) string {
	text, _ := l.value(key)
	return strings.TrimSpace(text)
}

// list returns the elements of a repeatable setting. Each text may hold several, separated by
// commas.
func (l *loader) list(key string) (all []string) {
	text, _ := l.value(key)
	for _, part := range strings.Split(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			all = append(all, part)
		}
	}
	return all
}

// lines returns the elements of a repeatable setting as they were written. A variable of the
// environment, or a text in the YAML file, has one in each line.
func (l *loader) lines(key string) []string {
	switch text, list := l.value(key); {
	case list != nil:
		return list
	case l.source(key) == "":
		return nil
	default:
		return strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	}
}
