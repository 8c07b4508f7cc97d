package verify

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/registry/signature"
	"kubevirt.io/disk/registry/transport"
)

// Options are the settings of the controller.
type Options struct {
	// Policies is a directory of files NAME.yaml, each with a policy of package signature. The
	// label v1alpha1.LabelSignaturePolicy of a namespace names its policy; without the label, it is
	// default.yaml. "": no signatures are required.
	Policies string
	// Registry has the settings for access to registries. Its Gate is not used.
	Registry transport.Options
}

// defaultPolicy is the policy of namespaces without a label.
const defaultPolicy = "default"

// Check returns the errors in the options, in words for the person who set them.
func (o Options) Check() error {
	if o.Policies == "" {
		return nil
	}
	if err := (signature.Options{Policy: o.file(defaultPolicy)}).Check(); err != nil {
		return fmt.Errorf("signature-policies: %w", err)
	}
	c, err := transport.New(o.Registry)
	if err == nil {
		c.Close()
	}
	return err
}

func (o Options) file(policy string) string { return filepath.Join(o.Policies, policy+".yaml") }

// Verifier decides which images may be used.
type Verifier struct {
	// Live reads namespaces from the API server: a change of a label takes effect at once.
	Live    client.Reader
	Options Options
}

var _ objects.Images = (*Verifier)(nil)

// asked are the requirements for an image.
type asked struct {
	policy signature.Options
	ref    transport.Reference
	keys   []string // fingerprints; none: no signature is needed
	// The reason why the image may not be used even with a signature; "": none.
	reason, message string
}

func (a asked) refuse(reason, format string, args ...any) asked {
	a.reason, a.message = reason, fmt.Sprintf(format, args...)
	return a
}

// ask returns the requirements for the image of an identity, which has one.
func (v *Verifier) ask(ctx context.Context, id *v1alpha1.VMIdentity) (a asked, err error) {
	if v.Options.Policies == "" {
		return a, nil
	}
	if a.ref, err = transport.ParseReference(id.Spec.Image); err != nil || !a.ref.Remote() {
		return a.refuse(v1alpha1.ReasonNotSigned, "the image %s cannot be verified: name one in a "+
			"registry, as registry/name@sha256:...", id.Spec.Image), nil
	}
	if _, ok := a.ref.Digest(); !ok {
		return a.refuse(v1alpha1.ReasonNotSigned, "the image %s has no digest, and may be another "+
			"one when it is used", id.Spec.Image), nil
	}
	return v.askOf(ctx, id.Namespace, a.ref)
}

// Keys returns the keys for an image that is fetched in a namespace, one of which must have signed
// it; none: no signature is required. image has the form for ParseSource. A reason tells why it may
// not be fetched.
func (v *Verifier) Keys(ctx context.Context, in, image string) (keys []signature.Key, reason,
	message string, err error) {
	ref, err := transport.ParseSource(image)
	if err != nil {
		return nil, v1alpha1.ReasonInvalid, short(err), nil
	}
	a, err := v.askOf(ctx, in, ref)
	if err != nil || a.reason != "" {
		return nil, a.reason, a.message, err
	}
	// The policy may have changed since. Use its present keys.
	keys, err = a.policy.Ours(ref)
	return keys, "", "", err
}

// askOf returns the requirements in a namespace for an image in a registry.
func (v *Verifier) askOf(ctx context.Context, in string, ref transport.Reference) (a asked,
	err error) {
	a.ref = ref
	namespace, err := objects.Find[corev1.Namespace](ctx, v.Live, "namespace",
		client.ObjectKey{Name: in})
	if err != nil {
		return a, err
	}
	if namespace == nil {
		return a.refuse(v1alpha1.ReasonUnverified, "there is no namespace %s", in), nil
	}
	name, labelled := namespace.Labels[v1alpha1.LabelSignaturePolicy]
	if !labelled {
		name = defaultPolicy
	}
	a.policy.Policy = v.Options.file(name)
	if _, err := os.Stat(a.policy.Policy); errors.Is(err, os.ErrNotExist) {
		return a.refuse(v1alpha1.ReasonNotSigned, "the signature policy %q of the namespace "+
			"does not exist, so no image is used: the administrator of the cluster has to correct "+
			"the namespace's label %s, or the policies of the controller", name,
			v1alpha1.LabelSignaturePolicy), nil
	}
	a.keys, err = a.policy.Ask(a.ref)
	var no *signature.RefusedError
	switch {
	case errors.As(err, &no):
		return a.refuse(v1alpha1.ReasonNotSigned, "%s", short(no)), nil
	case err != nil:
		return a.refuse(v1alpha1.ReasonNotSigned, "the policy %q cannot be read, so no image is "+
			"used: %v", name, short(err)), nil
	}
	return a, nil
}

// maxText limits the text from a registry or a file in messages. Bytes.
const maxText = 1000

func short(err error) string {
	text := err.Error()
	if len(text) > maxText {
		text = text[:maxText-3] + "..."
	}
	return text
}

// signed reports whether the status says that one of the keys has signed the image.
func signed(id *v1alpha1.VMIdentity, keys []string) bool {
	by := id.Status.SignedBy
	return by != nil && by.Image == id.Spec.Image && slices.Contains(keys, by.Key)
}

// Refuse returns why the image of an identity may not be used now, or "". It asks no registry.
func (v *Verifier) Refuse(ctx context.Context, id *v1alpha1.VMIdentity) (reason, message string,
	err error) {
	if id.Spec.Image == "" {
		return "", "", nil
	}
	a, err := v.ask(ctx, id)
	switch {
	case err != nil || a.reason != "":
		return a.reason, a.message, err
	case len(a.keys) == 0 || signed(id, a.keys):
		return "", "", nil
	}
	c := meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionVerified)
	if c != nil && c.Status == metav1.ConditionFalse {
		return c.Reason, c.Message, nil
	}
	return v1alpha1.ReasonVerifying, "the signature of its image is being looked for", nil
}

const (
	// timeout is how long a registry may send nothing, and lookTime how long one look-up may take.
	timeout  = 20 * time.Second
	lookTime = 2 * time.Minute
)

// findSignature looks for a signature of an image by one of the required keys.
func (v *Verifier) findSignature(ctx context.Context, a asked) (key string, err error) {
	_, admitted, err := v.named(ctx, a)
	if err == nil && admitted.Key == "" {
		err = errors.New("the policy has changed meanwhile")
	}
	return admitted.Key, err
}

// named reads the manifest of a reference, if the policy admits the reference.
func (v *Verifier) named(ctx context.Context, a asked) (content []byte,
	admitted transport.Admission, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, lookTime, fmt.Errorf(
		"its registry has not answered within %s", lookTime))
	defer cancel()
	opt := v.Options.Registry
	if opt.Timeout <= 0 {
		opt.Timeout = timeout
	}
	if opt.Gate, err = signature.NewGate(a.policy); err != nil {
		return nil, admitted, err
	}
	c, err := transport.New(opt)
	if err != nil {
		return nil, admitted, err
	}
	defer c.Close()
	source, err := c.Source(a.ref, "")
	if err != nil {
		return nil, admitted, err
	}
	defer source.Close()
	content, _, admitted, err = transport.Named(ctx, source, a.ref)
	return content, admitted, err
}

// Found is the image of a tag.
type Found struct {
	Digest string
	// Reason and Message tell why it is unknown, or must not be used. "": it may be used.
	Reason, Message string
}

// Resolve asks a registry for the image of a reference with a tag, and checks it by the policy of a
// namespace. Without Policies, every image is admitted.
func (v *Verifier) Resolve(ctx context.Context, namespace string, ref transport.Reference) (Found,
	error) {
	a := asked{ref: ref}
	if v.Options.Policies != "" {
		var err error
		if a, err = v.askOf(ctx, namespace, ref); err != nil || a.reason != "" {
			return Found{Reason: a.reason, Message: a.message}, err
		}
	}
	content, _, err := v.named(ctx, a)
	var status *transport.StatusError
	switch {
	case errors.As(err, new(*signature.RefusedError)):
		return Found{Reason: v1alpha1.ReasonNotSigned, Message: short(err)}, nil
	case errors.As(err, &status) && status.Status == http.StatusNotFound:
		return Found{Reason: v1alpha1.ReasonTagMissing, Message: "there is no such tag"}, nil
	case err != nil:
		return Found{Reason: v1alpha1.ReasonUnverified, Message: short(err)}, nil
	}
	if !transport.ManifestKind(content, "").IsIndex() {
		if _, err := transport.ParseManifest(content); err != nil {
			return Found{Reason: v1alpha1.ReasonInvalid, Message: short(err)}, nil
		}
	}
	return Found{Digest: transport.DigestOf(content)}, nil
}
