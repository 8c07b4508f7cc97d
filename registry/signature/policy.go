package signature

import (
	"fmt"
	"path/filepath"
	"strings"

	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/plainyaml"
	"kubevirt.io/disk/registry/transport"
)

// Options say whose signatures images must have. The zero value requires none.
type Options struct {
	// Keys are files with public keys. Every image must be signed by one of them.
	Keys []string
	// Policy is a file that says which keys are required, by repository. It cannot be used together
	// with Keys.
	Policy string
}

// Enabled reports whether signatures are required.
func (o Options) Enabled() bool { return len(o.Keys) > 0 || o.Policy != "" }

// The words of a policy.
const (
	actionAllow = "allow" // without a signature
	actionDeny  = "deny"
	everything  = "*" // the prefix of all images
)

type policyFile struct {
	Default string       `yaml:"default"` // "": deny
	Images  []policyRule `yaml:"images"`
}

type policyRule struct {
	Prefix string   `yaml:"prefix"`
	Keys   []string `yaml:"keys"` // files, or keys in PEM
	Action string   `yaml:"action"`
}

// policy says what each image needs.
type policy struct {
	name      string // of the file; "": the keys were given one by one
	rules     map[string]rule
	otherwise rule
}

// rule says what some images need.
type rule struct {
	prefix string // "": there is no rule for them
	allow  bool   // without a signature
	keys   []Key  // one of them must have signed; none: nobody may read them
}

// Check reads the files, and returns what is wrong with them.
func (o Options) Check() error {
	_, err := o.read()
	return err
}

// read reads the files. They are read for each image, so that a change takes effect for the next
// one.
func (o Options) read() (*policy, error) {
	if o.Policy == "" {
		p := new(policy)
		for _, file := range o.Keys {
			keys, err := readKeys(file)
			if err != nil {
				return nil, err
			}
			p.otherwise.keys = append(p.otherwise.keys, keys...)
		}
		return p, nil
	}
	if len(o.Keys) > 0 {
		return nil, fmt.Errorf("keys and the policy %q are both given: name the keys in the "+
			"policy, under the prefix \"%s\"", o.Policy, everything)
	}
	text, err := osfile.ReadText(o.Policy)
	if err != nil {
		return nil, err
	}
	p, err := parsePolicy(text, filepath.Dir(o.Policy))
	if err != nil {
		return nil, fmt.Errorf("the policy %q: %w", o.Policy, err)
	}
	p.name = o.Policy
	return p, nil
}

func readKeys(name string) ([]Key, error) {
	text, err := osfile.ReadText(name)
	if err != nil {
		return nil, fmt.Errorf("a key to verify with: %w", err)
	}
	keys, err := ParseKeys(text)
	if err != nil {
		return nil, fmt.Errorf("a key to verify with: %q: %w", name, err)
	}
	return keys, nil
}

// parsePolicy reads a policy. Names of files are relative to dir.
func parsePolicy(text []byte, dir string) (*policy, error) {
	var file policyFile
	if err := plainyaml.Decode(text, plainyaml.MaxValues, &file); err != nil {
		return nil, err
	}
	p := &policy{rules: make(map[string]rule)}
	switch file.Default {
	case "", actionDeny:
	case actionAllow:
		p.otherwise.allow = true
	default:
		return nil, fmt.Errorf("default: %q is neither %s nor %s", file.Default, actionDeny,
			actionAllow)
	}
	for i, r := range file.Images {
		one, names, err := r.parse(dir)
		if err != nil {
			return nil, fmt.Errorf("images[%d]: %w", i, err)
		}
		for _, name := range names {
			if _, twice := p.rules[name]; twice {
				return nil, fmt.Errorf("images[%d]: there are two rules for %q, which is %q", i,
					r.Prefix, name)
			}
			p.rules[name] = one
		}
	}
	return p, nil
}

// parse also returns the prefixes of images that the rule is for.
func (r policyRule) parse(dir string) (one rule, names []string, err error) {
	if names, err = parsePrefix(r.Prefix); err != nil {
		return one, nil, err
	}
	one.prefix = r.Prefix
	switch {
	case len(r.Keys) > 0 && r.Action != "":
		return one, nil, fmt.Errorf("%q has keys and an action: leave out one of them", r.Prefix)
	case r.Action == actionAllow:
		one.allow = true
	case r.Action == actionDeny:
	case r.Action != "":
		return one, nil, fmt.Errorf("action: %q is neither %s nor %s", r.Action, actionAllow,
			actionDeny)
	case len(r.Keys) == 0:
		return one, nil, fmt.Errorf("%q has neither keys nor an action", r.Prefix)
	}
	for _, text := range r.Keys {
		var keys []Key
		if strings.HasPrefix(strings.TrimSpace(text), "-----BEGIN") {
			keys, err = ParseKeys([]byte(text))
		} else {
			if !filepath.IsAbs(text) {
				text = filepath.Join(dir, text)
			}
			keys, err = readKeys(text)
		}
		if err != nil {
			return one, nil, fmt.Errorf("the keys of %q: %w", r.Prefix, err)
		}
		one.keys = append(one.keys, keys...)
	}
	return one, names, nil
}

func parsePrefix(text string) ([]string, error) {
	if text == everything {
		return []string{everything}, nil
	}
	names, err := transport.ParseNamePrefix(text)
	if err != nil {
		return nil, fmt.Errorf("the prefix %q is neither a registry (HOST), nor the beginning of "+
			"a repository's path (HOST/PATH), nor %q: %w", text, everything, err)
	}
	return names, nil
}

// ruleFor finds the rule for an image: the one with the longest prefix. A prefix ends where a part
// of the path does. An image that is not in a registry has only the rule for everything.
func (p *policy) ruleFor(ref transport.Reference) rule {
	if ref.Remote() {
		for name := ref.NormalName(); ; {
			if r, ok := p.rules[name]; ok {
				return r
			}
			i := strings.LastIndexByte(name, '/')
			if i < 0 {
				break
			}
			name = name[:i]
		}
	}
	if r, ok := p.rules[everything]; ok {
		return r
	}
	return p.otherwise
}

// denies says why nobody may read an image by its rule, even if it is signed; "": it may be read.
// The text completes "the image ...".
func (p *policy) denies(ref transport.Reference, r rule) string {
	switch {
	case r.allow || len(r.keys) > 0:
		return ""
	case r.prefix == "" && !ref.Remote():
		return fmt.Sprintf("is in no registry, and the policy %q has no rule for those: it needs "+
			"one with the prefix %q", p.name, everything)
	case r.prefix == "":
		return fmt.Sprintf("has no rule in the policy %q, which denies all others: name its "+
			"repository there", p.name)
	}
	return fmt.Sprintf("is denied by the policy %q, for %q", p.name, r.prefix)
}
