package objects

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// annotationApplied is on an object that Ensure made: a digest of the applied object.
const annotationApplied = v1alpha1.Group + "/applied"

// Ensure applies an object. If the same was applied before, it sends no request. It returns whether
// it applied. have is the object as it was read; without a resourceVersion there is none yet. Other
// people's changes in fields of the object stay until another object is wanted.
func Ensure(ctx context.Context, c client.Client, have, want client.Object) (bool, error) {
	other, err := differs(have, want)
	if !other || err != nil {
		return false, err
	}
	return true, Apply(ctx, c, want)
}

// Make is Ensure for a kind of which the cache has only our own objects. An object of that name
// that somebody else has made is not in the cache, and must not be changed: the error is
// AlreadyExists.
func Make(ctx context.Context, c client.Client, have, want client.Object) (bool, error) {
	if have.GetResourceVersion() != "" {
		return Ensure(ctx, c, have, want)
	}
	if _, err := differs(have, want); err != nil {
		return false, err
	}
	return true, c.Create(ctx, want, client.FieldOwner(v1alpha1.FieldManager))
}

// differs notes a digest on an object that is wanted, and reports whether that of the object as it
// was read is another one.
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

// Refused says in words for a person why the API server refuses an object, with the reason of a
// condition. It returns "" if the error may pass by itself.
func Refused(err error, what string) (reason, message string) {
	switch {
	case apierrors.IsForbidden(err) && strings.Contains(err.Error(), "exceeded quota"):
		return v1alpha1.ReasonQuotaExceeded,
			fmt.Sprintf("the quota of the namespace has no room for %s: %v", what, err)
	case apierrors.IsForbidden(err):
		return v1alpha1.ReasonFailed,
			fmt.Sprintf("the API server does not allow %s: %v", what, err)
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		return v1alpha1.ReasonInvalid,
			fmt.Sprintf("the API server does not accept %s: %v", what, err)
	}
	return "", ""
}
