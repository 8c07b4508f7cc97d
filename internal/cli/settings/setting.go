package settings

import (
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
)

// FlagConfig and EnvConfig name the YAML file.
const (
	FlagConfig = "config"
	EnvConfig  = "KUBEVIRT_DISK_CONFIG"
)

// The keys of settings that other commands than serve use, too.
const (
	KeyTargetName    = "target-name"
	KeyPort          = "port"
	KeyAccessMode    = "access-mode"
	KeyCopyMode      = "copy-mode"
	KeyMetricsListen = "metrics-listen"
)

// Setting is one row of the table: a flag, its environment variables, and the key of the YAML file,
// which is the flag's name. A flag wins over the environment, the environment over the file, and
// the file over the default. Flags, help, completion, the names in messages and the daemon's
// options are all made from these rows.
type Setting struct {
	Key     string   // flag and YAML key
	Env     []string // if several are set, they must agree
	Default string
	Usage   string // the word in backquotes names the value
	Kind    Kind
	Empty   bool     // an empty value has a meaning: off, or none
	Choices []string // values for a shell's completion
	Scope   Scope
	Section string // section in the help of serve
	Command string // the only command with it; "": serve, and possibly others
	To      Landing
}

// Kind is the kind of a setting's value.
type Kind uint8

// The kinds.
const (
	KindText Kind = iota
	KindFile      // a file name, which a shell completes
	KindDir       // the same for a directory
	KindBool
	KindList
	KindLines // a list whose elements may have commas and spaces
)

// Scope says which disks a setting of serve is for, if any.
type Scope uint8

// The scopes. Settings of single disks are in the YAML file only, under the names of their images.
const (
	ForDaemon  Scope = iota
	ForDisks         // all disks, and single ones
	ForOneDisk       // single disks
)

// Landing is the field for the value of a setting. The zero value is for a setting that the command
// itself reads, together with others.
type Landing struct {
	At  any                        // a pointer to the field
	Set func(given []string) error // nil: several settings decide, and the command joins them
}

// Into is a field for the result of parse.
func Into[T any](at *T, parse func(text string) (T, error)) Landing {
	return Landing{at, func(given []string) error {
		v, err := parse(given[0])
		if err == nil {
			*at = v
		}
		return err
	}}
}

// Text is a field for the text.
func Text(at *string) Landing {
	return Into(at, func(text string) (string, error) { return text, nil })
}

// Truth is a field for true or false.
func Truth(at *bool) Landing { return Into(at, ParseTruth) }

// ParseTruth reads true or false.
func ParseTruth(value string) (bool, error) {
	v, err := strconv.ParseBool(value)
	if err != nil {
		return false, fmt.Errorf("%q is neither true nor false", value)
	}
	return v, nil
}

// List is a field for all elements of a list.
func List(at *[]string) Landing {
	return Landing{at, func(given []string) error {
		*at = given
		return nil
	}}
}

// InSection puts rows into a section.
func InSection(title string, rows []Setting) []Setting {
	for i := range rows {
		rows[i].Section = title
	}
	return rows
}

// AddFlags registers --config and the flags of the given settings.
func AddFlags(flags *pflag.FlagSet, rows []Setting) {
	flags.SortFlags = false
	AddSettings(flags, rows)
	flags.String(FlagConfig, "", "YAML `file` with any of these settings, keyed by the flags' "+
		"names ["+EnvConfig+"]")
}

// IsSetting is the annotation of a flag whose value Load checks.
const IsSetting = "setting"

// AddSettings registers the flags of settings.
func AddSettings(flags *pflag.FlagSet, rows []Setting) {
	for _, s := range rows {
		usage := s.Usage + " [" + strings.Join(s.Env, ", ") + "]"
		switch s.Kind {
		case KindBool:
			flags.Bool(s.Key, s.Default == "true", usage)
		case KindList:
			flags.StringSlice(s.Key, nil, usage)
		case KindLines:
			flags.StringArray(s.Key, nil, usage)
		default:
			flags.String(s.Key, s.Default, usage)
		}
		_ = flags.SetAnnotation(s.Key, IsSetting, nil) // it fails without a flag
	}
}

// Pick returns the rows of the given keys.
func Pick(rows []Setting, keys ...string) []Setting {
	return Only(rows, func(s Setting) bool { return slices.Contains(keys, s.Key) })
}

// Only returns the rows for which keep returns true.
func Only(rows []Setting, keep func(Setting) bool) []Setting {
	return slices.DeleteFunc(slices.Clone(rows), func(s Setting) bool { return !keep(s) })
}

// Find returns the row of a key.
func Find(rows []Setting, key string) (Setting, bool) {
	i := slices.IndexFunc(rows, func(s Setting) bool { return s.Key == key })
	if i < 0 {
		return Setting{}, false
	}
	return rows[i], true
}

// Keys are the keys of rows.
func Keys(rows []Setting) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, s := range rows {
			if !yield(s.Key) {
				return
			}
		}
	}
}
