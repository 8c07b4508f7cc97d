package settings

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"

	"kubevirt.io/disk/internal/problems"
)

// Loader finds the value and the source of each setting, so that an error can name the place to
// change. Viper knows which value wins, but not its source.
type Loader struct {
	Flags    *pflag.FlagSet
	Read     Reader            // of files that settings name
	Disks    map[string]Single // by image; only from the file
	Problems problems.List     // all mistakes, so that a person sees all of them at once

	viper  *viper.Viper
	env    map[string]string // key to the variable that sets it
	file   string
	values map[string]any // of the file, by key: a string, or a list of them
}

// Known is what the YAML file may have.
type Known struct {
	Rows  []Setting // of all commands
	Disks []Setting // of single disks
	// Hint completes the message about an unknown key. May be empty.
	Hint func(key string) string
}

// Load finds the settings of a command in parsed flags, the environment and the file. Fields do not
// change yet.
func Load(read Reader, flags *pflag.FlagSet, rows []Setting, known Known) *Loader {
	l := &Loader{Flags: flags, env: map[string]string{}, Read: read,
		viper: viper.NewWithOptions(viper.KeyDelimiter("\n"))} // no key has parts
	l.viper.AllowEmptyEnv(true) // pickEnv leaves out what counts as unset
	for _, s := range rows {
		l.viper.SetDefault(s.Key, s.Default)
		flag := flags.Lookup(s.Key)
		if list, ok := flag.Value.(pflag.SliceValue); ok && flag.Changed {
			// Viper would read the flag's CSV, and lose a list with one empty word.
			l.viper.Set(s.Key, list.GetSlice())
		} else {
			_ = l.viper.BindPFlag(s.Key, flag) // it fails without a flag
		}
		if name := l.pickEnv(s, flag.Changed); name != "" {
			l.env[s.Key] = name
			_ = l.viper.BindEnv(s.Key, name) // it fails without a key
		}
	}
	l.readFile(known)
	_ = l.viper.MergeConfigMap(l.values) // it never fails
	for _, s := range rows {
		if source := l.Source(s.Key); source != "" && !s.Empty && len(l.given(s)) == 0 {
			l.Problems.Add(source, "is empty: give it a value or leave it out")
		}
	}
	return l
}

// Land writes the values into their fields. A setting that has neither a value nor a default does
// not change its field.
func (l *Loader) Land(rows []Setting) {
	for _, s := range rows {
		given := l.given(s)
		if s.To.Set == nil || len(given) == 0 && !s.Empty {
			continue
		}
		if len(given) == 0 {
			given = []string{""}
		}
		if err := s.To.Set(given); err != nil {
			l.Problems.AddFrom(l.Name(s.Key), err)
		}
	}
}

// pickEnv returns the variable that sets s, or "". If an empty value has no meaning for a setting,
// an empty variable counts as unset: manifests and compose files pass variables on like that.
func (l *Loader) pickEnv(s Setting, decidedByFlag bool) string {
	picked, value := "", ""
	for _, name := range s.Env {
		v, ok := os.LookupEnv(name)
		switch {
		case !ok || v == "" && !s.Empty:
		case picked == "":
			picked, value = name, v
		case v != value && !decidedByFlag:
			l.Problems.Add(picked+" and "+name, "disagree (%q and %q): set only one of them", value,
				v)
		}
	}
	return picked
}

func (l *Loader) readFile(known Known) {
	flag := l.Flags.Lookup(FlagConfig)
	if flag == nil {
		return // a command without a file
	}
	source, path := "--"+FlagConfig, flag.Value.String()
	if !flag.Changed {
		source = EnvConfig
		path = os.Getenv(EnvConfig)
		if path == "" {
			return
		}
	}
	if path == "" {
		l.Problems.Add(source, "is empty: name a file or leave it out")
		return
	}
	l.file = path
	values, disks, problems := readFile(path, l.Read, known)
	l.Disks = disks
	for _, p := range problems {
		l.Problems.Add(source, "%s", p)
	}
	for _, s := range known.Rows {
		if s.Command != "" && values[s.Key] != nil && l.Flags.Lookup(s.Key) == nil {
			l.Problems.Add(source, "%q: %q is a setting of %s, and not of this command", path,
				s.Key, s.Command)
		}
	}
	l.values = values
}

// Source names what sets key: a flag, a variable, or a key of the file. "" means the default.
func (l *Loader) Source(key string) string {
	switch {
	case l.Flags.Changed(key):
		return "--" + key
	case l.env[key] != "":
		return l.env[key]
	case l.values[key] != nil:
		return fmt.Sprintf("%q in %q", key, l.file)
	}
	return ""
}

// Name is Source for messages that may also be about the default.
func (l *Loader) Name(key string) string {
	if source := l.Source(key); source != "" {
		return source
	}
	return "--" + key
}

// given returns the elements of a setting's value, if there is one.
func (l *Loader) given(s Setting) []string {
	switch s.Kind {
	case KindList:
		return l.List(s.Key)
	case KindLines:
		return l.Lines(s.Key)
	}
	if text := l.Text(s.Key); text != "" {
		return []string{text}
	}
	return nil
}

// value is the text of a setting, or the texts of a list in the YAML file or of a repeated flag.
func (l *Loader) value(key string) (text string, list []string) {
	if list, ok := l.viper.Get(key).([]string); ok {
		return strings.Join(list, ","), list
	}
	return l.viper.GetString(key), nil
}

// Text is the text of a setting, without spaces around it.
func (l *Loader) Text(key string) string {
	text, _ := l.value(key)
	return strings.TrimSpace(text)
}

// List returns the elements of a repeatable setting. Each text may have several, separated by
// commas.
func (l *Loader) List(key string) (all []string) {
	text, _ := l.value(key)
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			all = append(all, part)
		}
	}
	return all
}

// Lines returns the elements of a repeatable setting unchanged. In a variable of the environment,
// or a text in the YAML file, each line is one.
func (l *Loader) Lines(key string) []string {
	switch text, list := l.value(key); {
	case list != nil:
		return list
	case l.Source(key) == "":
		return nil
	default:
		return strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	}
}
