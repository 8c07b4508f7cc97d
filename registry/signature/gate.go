package signature

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"kubevirt.io/disk/registry/transport"
)

// RefusedError says that an image may not be read. That changes only with its signatures or with
// the policy.
type RefusedError struct {
	Ref    string
	Digest string // of what the reference names
	Why    string // completes "the image ..."
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("%s is refused: the image %s %s", e.Ref, e.Digest, e.Why)
}

// Ask returns what an image needs before anything of it is read: the fingerprints of the keys of
// which one must have signed it. none: it needs no signature. If nobody may read the image, the
// error is a *RefusedError.
func (o Options) Ask(ref transport.Reference) (keys []string, err error) {
	all, err := o.Ours(ref)
	return fingerprints(all), err
}

// Ours is Ask with the keys themselves.
func (o Options) Ours(ref transport.Reference) (keys []Key, err error) {
	p, err := o.read()
	if err != nil {
		return nil, err
	}
	r := p.ruleFor(ref)
	if why := p.denies(ref, r); why != "" {
		digest, _ := ref.Digest()
		return nil, &RefusedError{Ref: ref.String(), Digest: digest, Why: why}
	}
	if !r.allow {
		keys = r.keys
	}
	return keys, nil
}

func fingerprints(keys []Key) (all []string) {
	for _, k := range keys {
		all = append(all, k.Fingerprint)
	}
	return all
}

// Gate requires signatures. It reads the files of its options for each image.
type Gate struct{ opt Options }

// NewGate checks the files. It returns nil if no signatures are required.
func NewGate(opt Options) (transport.Gate, error) {
	if !opt.Enabled() {
		return nil, nil
	}
	if err := opt.Check(); err != nil {
		return nil, err
	}
	return &Gate{opt: opt}, nil
}

// Admit looks for a signature by one of the required keys.
func (g *Gate) Admit(ctx context.Context, a transport.Asked) (transport.Admission, error) {
	p, err := g.opt.read()
	if err != nil {
		return transport.Admission{}, fmt.Errorf("%s: nobody knows whose signature is asked for: "+
			"%w", a.Ref, err)
	}
	digest := transport.DigestOf(a.Content)
	refused := func(why string, args ...any) error {
		return &RefusedError{Ref: a.Ref.String(), Digest: digest, Why: fmt.Sprintf(why, args...)}
	}
	r := p.ruleFor(a.Ref)
	if why := p.denies(a.Ref, r); why != "" {
		return transport.Admission{}, refused("%s", why)
	} else if r.allow {
		return transport.Admission{}, nil
	}
	if e, err := parseProof(a.Proof); err == nil {
		if key, err := e.check(r.keys, a.Content); err == nil {
			return transport.Admission{Key: key.Fingerprint, Proof: a.Proof}, nil
		}
	}
	if len(a.Places) == 0 && a.Ref.IsAddress() {
		return transport.Admission{}, refused("is at an address, where no signature can be: "+
			"name it by its digest, and allow what is in no registry in a policy (prefix: %q, "+
			"action: allow)", everything)
	}
	if len(a.Places) == 0 {
		return transport.Admission{}, refused("lies where no signature can lie: only registries " +
			"and OCI layouts have them")
	}
	var seen looked
	for _, at := range a.Places {
		var admitted transport.Admission
		found, now := look(ctx, at, digest, func(e evidence) error {
			key, err := e.check(r.keys, a.Content)
			if err != nil {
				return err
			}
			proof, err := json.Marshal(e)
			admitted = transport.Admission{Key: key.Fingerprint, Proof: proof}
			return err
		})
		if found {
			return admitted, nil
		}
		if seen = now; !at.Mirror() {
			break
		}
	}
	if seen.away != nil {
		return transport.Admission{}, fmt.Errorf("%s: its signatures cannot be read now, so it "+
			"is not used yet: %w", a.Ref, seen.away)
	}
	return transport.Admission{}, refused("%s", seen.why(a.Content, r.keys))
}

// maxReasons bounds the reasons in a message.
const maxReasons = 3

// why says why no signature counts.
func (l *looked) why(content []byte, keys []Key) string {
	prints := fingerprints(keys)
	wanted := "asked for: " + strings.Join(prints[:min(len(prints), maxReasons)], ", ")
	if len(l.refused) == 0 && transport.ManifestKind(content, "").IsIndex() {
		return "has no signature (" + wanted + "). It is a list of images for several platforms, " +
			"which a signature of one of them does not cover: sign the list (kubevirt-disk " +
			"sign), or name a signed image of it by that image's digest"
	}
	if len(l.refused) == 0 {
		return "has no signature (" + wanted + "). If it is one of a signed list of images, name " +
			"the list, whose signature covers them, or sign its images, too (as " +
			"\"cosign sign --recursive\" does)"
	}
	var reasons []string
	for _, err := range l.refused {
		if len(reasons) > maxReasons {
			break
		}
		if text := err.Error(); !slices.Contains(reasons, text) {
			reasons = append(reasons, text)
		}
	}
	more := ""
	if len(reasons) > maxReasons {
		reasons, more = reasons[:maxReasons], ", and so on"
	}
	if l.left > 0 {
		more += fmt.Sprintf("; %d others were not looked at, because there is too much", l.left)
	}
	text := "has no signature that counts (" + wanted + "): its signature " +
		strings.Join(reasons, "; another one ") + more
	return text
}

// Found is a signature of an image, for people.
type Found struct {
	Format Format `json:"format"`
	// Key is the fingerprint of the key that has made it, if that is one of the given keys. "": it
	// is not.
	Key string `json:"key,omitempty"`
	// Problem is why it does not count; "": it counts.
	Problem string `json:"problem,omitempty"`
}

// List returns the signatures of the manifest or index content, which the reference names and src
// has open, and whether the options admit the image. refused is why they do not. It reads nothing
// else of the image.
func List(ctx context.Context, src transport.Source, ref transport.Reference, content []byte,
	opt Options) (all []Found, refused, err error) {
	var r rule
	if opt.Enabled() {
		p, err := opt.read()
		if err != nil {
			return nil, nil, err
		}
		r = p.ruleFor(ref)
	}
	places := transport.PlacesOf(src)
	if len(places) > 0 {
		last := places[len(places)-1]
		var seen looked
		_, seen = look(ctx, last, transport.DigestOf(content), func(e evidence) error {
			key, err := e.check(r.keys, content)
			f := Found{Format: e.Format, Key: key.Fingerprint}
			var other *signedOther
			switch {
			case errors.As(err, &other):
				f.Key, f.Problem = other.key.Fingerprint, "it is of "+other.what
			case errors.Is(err, errOtherKey) && len(r.keys) == 0:
				f.Problem = "no key was given to verify it with"
			case err != nil:
				f.Problem = "it " + err.Error()
			}
			all = append(all, f)
			return errShown // go on
		})
		for _, err := range seen.refused {
			if !errors.Is(err, errShown) {
				all = append(all, Found{Problem: "it " + err.Error()})
			}
		}
		if seen.away != nil {
			return all, nil, seen.away
		}
	}
	if opt.Enabled() {
		_, refused = (&Gate{opt: opt}).Admit(ctx, transport.Asked{Ref: ref, Content: content,
			Places: places})
	}
	return all, refused, nil
}

// errShown says that a signature was added to the list.
var errShown = errors.New("is on the list")
