package settings

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/plainyaml"
)

// KeyDisks is the key for the settings of single disks, by the names of their images.
const KeyDisks = "disks"

// Reader reads a settings or credential file.
type Reader func(path string) ([]byte, error)

// readFile reads the settings of a YAML file as text, like those of every other source, so that
// they are checked in one place. A number keeps its spelling: 03260 is a port and not an octal
// number. Messages quote keys, but not the values of unknown keys, which may be misplaced secrets.
func readFile(path string, read Reader, known Known) (map[string]any, map[string]Single, []string) {
	values := map[string]any{}
	var disks map[string]Single
	text, err := read(path)
	if err != nil {
		return values, nil, []string{
			fmt.Sprintf("%q cannot be read: %v", path, osfile.WithoutPath(err))}
	}
	root, err := plainyaml.Parse(text, plainyaml.MaxValues)
	if err != nil {
		return values, nil, []string{fmt.Sprintf("%q is not YAML that can be used: %s", path,
			yamlProblem(err))}
	}
	if root == nil || isNull(root) {
		return values, nil, nil // an empty file sets nothing
	}
	if root.Kind != yaml.MappingNode {
		return values, nil, []string{fmt.Sprintf("%q: line %d: want settings as \"key: value\"",
			path, root.Line)}
	}
	var problems []string
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		complain := func(format string, args ...any) {
			problems = append(problems, fmt.Sprintf("%q: line %d: %q %s", path, key.Line, key.Value,
				fmt.Sprintf(format, args...)))
		}
		if key.Value == KeyDisks && key.Kind == yaml.ScalarNode {
			if disks != nil {
				complain("is set twice")
				continue
			}
			var wrong []string
			disks, wrong = readDisks(path, value, known.Disks)
			problems = append(problems, wrong...)
			continue
		}
		row, ok := Find(known.Rows, key.Value)
		if !ok || key.Kind != yaml.ScalarNode {
			complain("is not a setting%s", known.Hint(key.Value))
			continue
		}
		if _, twice := values[key.Value]; twice {
			complain("is set twice")
			continue
		}
		v, err := settingValue(row, value)
		if err != nil {
			complain("%v", err)
			continue
		}
		values[key.Value] = v
	}
	return values, disks, problems
}

// yamlProblem returns the parser's message. It may quote the name of an anchor, but no other value,
// which may be a misplaced secret.
func yamlProblem(err error) string {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	if strings.HasPrefix(text, "unknown anchor") {
		return "a value begins with *, which makes it a reference: put it in quotes"
	}
	return text
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// settingValue returns the text of a scalar, or the texts of a list if the setting takes one.
func settingValue(s Setting, n *yaml.Node) (any, error) {
	switch {
	case isNull(n) && s.Empty:
		return nil, errors.New(`has no value: write "" to turn it off, or leave it out`)
	case isNull(n):
		return nil, errors.New("has no value: give it one or leave it out")
	case n.Kind == yaml.ScalarNode:
		return n.Value, nil
	case n.Kind == yaml.SequenceNode && (s.Kind == KindList || s.Kind == KindLines):
		list := []string{}
		for _, e := range n.Content {
			if e.Kind != yaml.ScalarNode || isNull(e) {
				return nil, errors.New("is a list of texts, but one element is not a text")
			}
			list = append(list, e.Value)
		}
		return list, nil
	case s.Kind == KindList || s.Kind == KindLines:
		return nil, errors.New("takes a text or a list of texts")
	}
	return nil, errors.New("takes a single value")
}

// Single are the settings of one disk in the file.
type Single struct {
	Source string            // the place to change, for messages
	Set    map[string]string // by key
}

// readDisks reads the value of KeyDisks. It checks the keys, not the values.
func readDisks(path string, n *yaml.Node, known []Setting) (map[string]Single, []string) {
	if n.Kind != yaml.MappingNode {
		return nil, []string{fmt.Sprintf("%q: line %d: %q holds settings by the names of images: "+
			"\"fedora.qcow2: {lun: 3}\"", path, n.Line, KeyDisks)}
	}
	disks := map[string]Single{}
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
		d := Single{Source: fmt.Sprintf("%q of %q in %q", KeyDisks, image.Value, path),
			Set: map[string]string{}}
		for j := 0; j+1 < len(settings.Content); j += 2 {
			key, value := settings.Content[j], settings.Content[j+1]
			_, twice := d.Set[key.Value]
			_, ok := Find(known, key.Value)
			switch {
			case !ok:
				complain(key.Line, "%q is not a setting of a disk: use %s", key.Value,
					strings.Join(slices.Sorted(Keys(known)), ", "))
			case twice:
				complain(key.Line, "%q is set twice", key.Value)
			case value.Kind != yaml.ScalarNode || isNull(value):
				complain(key.Line, "%q takes a single value", key.Value)
			default:
				d.Set[key.Value] = value.Value
			}
		}
		disks[image.Value] = d
	}
	return disks, problems
}

// Rereader reads the configuration and credential files at the start, and again while the daemon
// runs. A file that can be read only once, such as the pipe of a process substitution, keeps its
// first content, in kept by its path.
type Rereader struct{ kept map[string][]byte }

// NewRereader returns a Rereader that has read nothing yet.
func NewRereader() *Rereader { return &Rereader{kept: map[string][]byte{}} }

// Read returns the content of a file. It waits for a pipe the first time only.
func (r *Rereader) Read(path string) ([]byte, error) {
	if text, ok := r.kept[path]; ok {
		return text, nil
	}
	st, statErr := os.Stat(path)
	text, err := osfile.ReadText(path)
	if err == nil && (statErr != nil || !st.Mode().IsRegular()) {
		r.kept[path] = text
	}
	return text, err
}
