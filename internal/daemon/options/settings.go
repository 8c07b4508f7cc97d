package options

import (
	"reflect"
	"slices"
	"strings"
)

// Setting has the names of a field of the Options, for messages that ask for another value: a flag,
// or in a container mostly a variable.
type Setting struct {
	Key      string // in the configuration file
	Flag     string // as "--copy-mode", or the name of a setting without a flag
	Variable string // as "COPY_MODE"; may be empty
	Field    any    // a pointer to the field for the value
}

func (s Setting) String() string { return s.Flag + s.variable() }

// With is the text that sets it to a value.
func (s Setting) With(value string) string { return s.Flag + "=" + value + s.variable() }

func (s Setting) variable() string {
	if s.Variable == "" {
		return ""
	}
	return " (" + s.Variable + ")"
}

// Alternatives are the settings for one field, the usual one first.
type Alternatives []Setting

func (s Alternatives) String() string {
	names := make([]string, len(s))
	for i, one := range s {
		names[i] = one.String()
	}
	return strings.Join(names, " or ")
}

// SettingsOf returns the settings for a field of o.
func (o *Options) SettingsOf(field any) (all Alternatives) {
	for _, s := range o.Table(o) {
		if s.Field == field {
			all = append(all, s)
		}
	}
	if len(all) == 0 {
		return Alternatives{{Flag: "the settings"}}
	}
	return all
}

// Setting returns the first setting for a field of o.
func (o *Options) Setting(field any) Setting { return o.SettingsOf(field)[0] }

// Differences returns the keys of the settings in which two disks differ.
func (o *Options) Differences(a, b DiskSettings) (keys []string) {
	left, right := Options{Settings: Settings{Disk: a}}, Options{Settings: Settings{Disk: b}}
	others := o.Table(&right)
	for i, s := range o.Table(&left) {
		if !reflect.DeepEqual(s.Field, others[i].Field) {
			keys = append(keys, s.Key)
		}
	}
	slices.Sort(keys)
	return keys
}
