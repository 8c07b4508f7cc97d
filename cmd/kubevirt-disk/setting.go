package main

import (
	"iter"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"kubevirt.io/disk/internal/daemon/options"
)

// setting is one row of the contract: a flag, its environment variables, and the key of the YAML
// file, which is the flag's name. A flag wins over the environment, the environment over the file,
// and the file over the default. Nothing else has to know a setting: flags, help, completion, the
// names in messages and the daemon's options are made from the rows.
type setting struct {
	key     string   // flag and YAML key
	env     []string // if several are set, they must agree
	def     string
	usage   string // the word in backquotes names the value
	kind    kind
	empty   bool     // an empty value means something: off, or none
	choices []string // the values that a shell completes
	scope   scope
	section string // where the help of serve lists it
	to      landing
}

type kind uint8

const (
	kindText kind = iota
	kindFile      // the name of one, which a shell completes
	kindDir       // the same of a directory
	kindBool
	kindList
	kindLines // a list whose elements may have commas and spaces
)

// scope says what a setting of serve is about. Those of single disks are in the YAML file only,
// under the names of their images.
type scope uint8

const (
	ofDaemon    scope = iota
	ofDisks           // all disks, and single ones
	ofSingleOne       // single disks
)

// landing is where the value of a setting goes. The zero value is for a setting that is only read
// together with others.
type landing struct {
	at  any                        // a pointer to the field
	set func(given []string) error // nil: several settings decide, and loadConfig joins them
}

// into is a field that takes what parse makes of the text.
func into[T any](at *T, parse func(text string) (T, error)) landing {
	return landing{at, func(given []string) error {
		v, err := parse(given[0])
		if err == nil {
			*at = v
		}
		return err
	}}
}

func text(at *string) landing {
	return into(at, func(text string) (string, error) { return text, nil })
}

func truth(at *bool) landing { return into(at, parseTruth) }

// list is a field that takes all elements of a list.
func list(at *[]string) landing {
	return landing{at, func(given []string) error {
		*at = given
		return nil
	}}
}

// in puts rows into a section.
func in(section string, rows []setting) []setting {
	for i := range rows {
		rows[i].section = section
	}
	return rows
}

// addFlags registers --config and the flags of the given settings.
func addFlags(flags *pflag.FlagSet, rows []setting) {
	flags.SortFlags = false
	addSettings(flags, rows)
	flags.String(flagConfig, "", "YAML `file` with any of these settings, keyed by the flags' "+
		"names ["+envConfig+"]")
}

// addSettings registers the flags of settings.
func addSettings(flags *pflag.FlagSet, rows []setting) {
	for _, s := range rows {
		usage := s.usage + " [" + strings.Join(s.env, ", ") + "]"
		switch s.kind {
		case kindBool:
			flags.Bool(s.key, s.def == "true", usage)
		case kindList:
			flags.StringSlice(s.key, nil, usage)
		case kindLines:
			flags.StringArray(s.key, nil, usage)
		default:
			flags.String(s.key, s.def, usage)
		}
	}
}

// pick returns the rows of the given keys.
func pick(rows []setting, keys ...string) []setting {
	return only(rows, func(s setting) bool { return slices.Contains(keys, s.key) })
}

func only(rows []setting, keep func(setting) bool) []setting {
	return slices.DeleteFunc(slices.Clone(rows), func(s setting) bool { return !keep(s) })
}

// find returns the row of a key.
func find(rows []setting, key string) (setting, bool) {
	i := slices.IndexFunc(rows, func(s setting) bool { return s.key == key })
	if i < 0 {
		return setting{}, false
	}
	return rows[i], true
}

func keysOf(rows []setting) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, s := range rows {
			if !yield(s.key) {
				return
			}
		}
	}
}

// knownSettings are all that the YAML file may have, for one command or another.
func knownSettings() []setting {
	return slices.Concat(newConfig().settings(), provideSettings(new(providing)))
}

// nameOf names a setting in messages, as flag and as variable: in a container, people mostly set
// the variable.
func nameOf(key string) string {
	row, _ := find(knownSettings(), key)
	return row.named().String()
}

// named says what a person calls a setting.
func (s setting) named() options.Setting {
	return options.Setting{Key: s.key, Flag: "--" + s.key, Variable: strings.Join(s.env, ", "),
		Field: s.to.at}
}

// table says which settings land in which fields of o, for the daemon's messages.
func table(o *options.Options) []options.Setting {
	all := []options.Setting{
		{Key: keyDisks, Flag: `"` + keyDisks + `" in the configuration file`,
			Field: &o.Settings.Disks},
		{Flag: "CHAP_USERNAME and CHAP_PASSWORD", Field: &o.CHAP},
	}
	for _, row := range (&config{Options: o}).rows() {
		all = append(all, row.named())
	}
	return all
}
