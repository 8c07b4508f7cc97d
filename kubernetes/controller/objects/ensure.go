package objects

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// annotationApplied is on an object that Ensure made: a digest of the applied object.
const annotationApplied = v1alpha1.Group + "/applied"

// Ensure applies an object. If the same was applied before, it sends no request. It returns whether
// it applied the object. have is the object as read; without a resourceVersion there is none.
// Changes by others in fields of the object stay until want changes.
func Ensure(ctx context.Context, c client.Client, have, want client.Object) (bool, error) {
	other, err := differs(have, want)
	if !other || err != nil {
		return false, err
	}
	return true, Apply(ctx, c, want)
}

// Make is Ensure for a kind of which the cache has only our own objects. want is made with MetaOf.
func (k Kit) Make(ctx context.Context, have, want client.Object) (bool, error) {
	if have.GetResourceVersion() != "" {
		return Ensure(ctx, k.Client, have, want)
	}
	if _, err := differs(have, want); err != nil {
		return false, err
	}
	return true, k.New(ctx, want)
}

// New makes an object, with MetaOf, that is not in the cache. The error is AlreadyExists if there
// is an object of another owner with its name. If it is our own object, and the cache is late, the
// error is a conflict, which is temporary.
func (k Kit) New(ctx context.Context, o client.Object) error {
	err := k.Create(ctx, o, client.FieldOwner(v1alpha1.FieldManager))
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	kind, wrong := apiutil.GVKForObject(o, k.Scheme())
	if wrong != nil {
		return wrong
	}
	// The controller may list these kinds, but not get one object.
	ours := &metav1.PartialObjectMetadataList{}
	ours.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	if wrong := k.Live.List(ctx, ours, client.InNamespace(o.GetNamespace()),
		client.MatchingLabels(o.GetLabels())); wrong != nil {
		return fmt.Errorf("%s: %w", o.GetName(), wrong)
	}
	owner := o.GetAnnotations()[v1alpha1.AnnotationOwner]
	if slices.ContainsFunc(ours.Items, func(one metav1.PartialObjectMetadata) bool {
		return one.Name == o.GetName() && one.Annotations[v1alpha1.AnnotationOwner] == owner
	}) {
		return apierrors.NewConflict(schema.GroupResource{Group: kind.Group, Resource: kind.Kind},
			o.GetName(), err)
	}
	return err
}

// differs records the digest of a wanted object on it, and reports whether the digest on the
// existing object is another one.
func differs(have, want client.Object) (bool, error) {
	digest, err := digest(want)
	if err != nil || have.GetAnnotations()[annotationApplied] == digest {
		return false, err
	}
	annotations := map[string]string{annotationApplied: digest}
	maps.Copy(annotations, want.GetAnnotations())
	want.SetAnnotations(annotations)
	return true, nil
}

func digest(object client.Object) (string, error) {
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		return "", fmt.Errorf("%s: %w", object.GetName(), err)
	}
	text, err := json.Marshal(content)
	if err != nil {
		return "", fmt.Errorf("%s: %w", object.GetName(), err)
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16]), nil
}

// Refused explains to a person why the API server refuses an object, with the reason for a
// condition. It returns "" if the error may be temporary.
func Refused(err error, what string) (reason, message string) {
	switch {
	case apierrors.IsForbidden(err) && strings.Contains(err.Error(), "exceeded quota"):
		return v1alpha1.ReasonQuotaExceeded,
			fmt.Sprintf("the quota of the namespace has no room for %s: %v", what, err)
	case apierrors.IsForbidden(err):
		return v1alpha1.ReasonFailed, fmt.Sprintf("the API server does not allow %s: %v", what, err)
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		return v1alpha1.ReasonInvalid,
			fmt.Sprintf("the API server does not accept %s: %v", what, err)
	}
	return "", ""
}
