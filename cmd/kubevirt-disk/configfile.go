package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"kubevirt.io/disk/internal/plainyaml"
)

// maxConfigFile limits the size of a settings or credential file, in bytes.
const maxConfigFile = 1 << 20

// fileReader reads a settings or credential file.
type fileReader func(path string) ([]byte, error)

// readConfigFile reads the settings of a YAML file as text, like those of every other source, so
// that one place checks them. A number keeps its spelling: 03260 is a port and not an octal number.
// Messages quote keys, but not the values of unknown keys: such a value may be a misplaced secret.
func readConfigFile(path string, read fileReader) (
	map[string]any, map[string]diskOverrides, []string) {
	values := map[string]any{}
	var disks map[string]diskOverrides
	text, err := read(path)
	if err != nil {
		return values, nil, []string{fmt.Sprintf("%q cannot be read: %v", path, withoutPath(err))}
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
	known := knownSettings()
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		complain := func(format string, args ...any) {
			problems = append(problems, fmt.Sprintf("%q: line %d: %q %s", path, key.Line, key.Value,
				fmt.Sprintf(format, args...)))
		}
		if key.Value == keyDisks && key.Kind == yaml.ScalarNode {
			if disks != nil {
				complain("is set twice")
				continue
			}
			var wrong []string
			disks, wrong = readDisks(path, value)
			problems = append(problems, wrong...)
			continue
		}
		row, ok := find(known, key.Value)
		if !ok || key.Kind != yaml.ScalarNode {
			complain("is not a setting%s", unknownKeyHint(key.Value, known))
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

// yamlProblem says what the parser found. It may quote the name of an anchor, but no other value: a
// value may be a misplaced secret.
func yamlProblem(err error) string {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	if strings.HasPrefix(text, "unknown anchor") {
		return "a value begins with *, which makes it a reference: put it in quotes"
	}
	return text
}

// readTimeout limits the time until the end of a settings or credential file. The pipe of a
// process substitution is being written while it is read. But nobody writes to a pipe that was
// named by mistake, and a terminal waits for a person.
const readTimeout = 10 * time.Second

// readBounded reads a file that may be a pipe. It limits the memory and the time.
func readBounded(path string) ([]byte, error) { return readWithin(path, readTimeout) }

func readWithin(path string, timeout time.Duration) ([]byte, error) {
	var text []byte
	var err error
	done := make(chan struct{})
	// Opening a pipe may block for ever. This goroutine then ends with the process.
	go func() {
		defer close(done)
		var f *os.File
		if f, err = os.Open(path); err != nil {
			return
		}
		defer f.Close()
		text, err = io.ReadAll(io.LimitReader(f, maxConfigFile+1))
	}()
	select {
	case <-done:
	case <-time.After(timeout):
		return nil, fmt.Errorf("it did not end within %v: name a regular file, or a pipe that is "+
			"written to and closed", timeout)
	}
	if len(text) > maxConfigFile {
		return nil, fmt.Errorf("it is larger than %d bytes", maxConfigFile)
	}
	return text, err
}

// withoutPath returns the cause of an error about a file when the message already names the file,
// or must not name it.
func withoutPath(err error) error {
	var perr *fs.PathError
	if errors.As(err, &perr) {
		return perr.Err
	}
	return err
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// settingValue returns the text of a scalar, or the texts of a list if the setting takes one.
func settingValue(s setting, n *yaml.Node) (any, error) {
	switch {
	case isNull(n) && s.empty:
		return nil, errors.New(`has no value: write "" to turn it off, or leave it out`)
	case isNull(n):
		return nil, errors.New("has no value: give it one or leave it out")
	case n.Kind == yaml.ScalarNode:
		return n.Value, nil
	case n.Kind == yaml.SequenceNode && (s.kind == kindList || s.kind == kindLines):
		list := []string{}
		for _, e := range n.Content {
			if e.Kind != yaml.ScalarNode || isNull(e) {
				return nil, errors.New("is a list of texts, but one element is not a text")
			}
			list = append(list, e.Value)
		}
		return list, nil
	case s.kind == kindList || s.kind == kindLines:
		return nil, errors.New("takes a text or a list of texts")
	}
	return nil, errors.New("takes a single value")
}

// unknownKeyHint helps with the likely mistakes: a misspelt key, and a credential in the file.
func unknownKeyHint(key string, known []setting) string {
	if looksLikeCredential(key) {
		return ": " + credentialsHint
	}
	kebab := strings.ReplaceAll(strings.ToLower(key), "_", "-")
	switch _, ok := find(known, kebab); {
	case ok && kebab != key:
		return fmt.Sprintf(": write %q", kebab)
	case ok:
		return ""
	}
	return didYouMean(kebab, "", wordsAsCommands(keysOf(known)))
}

const credentialsHint = "CHAP credentials come from the environment (CHAP_USERNAME, " +
	"CHAP_PASSWORD) or from files (CHAP_PASSWORD_FILE)"

func looksLikeCredential(name string) bool {
	name = strings.ToLower(name)
	for _, word := range []string{"password", "secret", "chap", "username"} {
		if strings.Contains(name, word) {
			return true
		}
	}
	return false
}
