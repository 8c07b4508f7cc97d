// Package objects has the functions of every controller for writing objects: by server-side apply
// under one name, and a status only if it changed.
package objects

import (
	"context"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/validate/content"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// Apply makes an object, or changes its given fields, by server-side apply (one request). It takes
// over fields that others own with another value. It leaves out the status and the fields that the
// server fills in. Fields with the zero value and omitempty count as not given.
func Apply(ctx context.Context, c client.Client, object client.Object) error {
	kind, err := apiutil.GVKForObject(object, c.Scheme())
	if err != nil {
		return err
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		return fmt.Errorf("%s %s: %w", kind.Kind, object.GetName(), err)
	}
	u := &unstructured.Unstructured{Object: content}
	u.SetGroupVersionKind(kind)
	u.SetManagedFields(nil)
	u.SetResourceVersion("")
	unstructured.RemoveNestedField(u.Object, "status")
	unstructured.RemoveNestedField(u.Object, "metadata", "creationTimestamp")
	return c.Apply(ctx, client.ApplyConfigurationFromUnstructured(u),
		client.FieldOwner(v1alpha1.FieldManager), client.ForceOwnership)
}

// Find reads an object; nil: there is none. what is its kind for errors, such as "claim". The name
// may be any text from a person: if no object can have it, Find does not ask the API server,
// because the client would return an error.
func Find[T any, O interface {
	*T
	client.Object
}](ctx context.Context, from client.Reader, what string, key client.ObjectKey) (O, error) {
	if key.Name == "" || len(content.IsPathSegmentName(key.Name)) > 0 {
		return nil, nil
	}
	o := O(new(T))
	err := from.Get(ctx, key, o)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("%s %s: %w", what, key.Name, err)
	}
	return o, nil
}

// KindOf is the kind of a typed object, for people.
func KindOf(o client.Object) string { return strings.TrimPrefix(fmt.Sprintf("%T", o), "*v1.") }

// PatchStatus writes the status of after if it differs from that of before, the object as read. If
// another client has written it since, the error is a conflict: several controllers write
// conditions in one list, and none may overwrite another's.
func PatchStatus(ctx context.Context, c client.Client, before, after client.Object) error {
	was, err := statusOf(before)
	if err != nil {
		return err
	}
	is, err := statusOf(after)
	if err != nil {
		return err
	}
	if equality.Semantic.DeepEqual(was, is) {
		return nil
	}
	return c.Status().Patch(ctx, after, Lock(before), client.FieldOwner(v1alpha1.FieldManager))
}

// Lock is a merge patch that fails if the object was written since it was read.
func Lock(before client.Object) client.Patch {
	return client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
}

// Change applies change to an object and writes it, if it was not written since it was read. It is
// no error if the object is gone.
func Change[T client.Object](ctx context.Context, c client.Client, before T, change func(T)) error {
	after := before.DeepCopyObject().(T)
	change(after)
	return client.IgnoreNotFound(c.Patch(ctx, after, Lock(before),
		client.FieldOwner(v1alpha1.FieldManager)))
}

// Owned are the owner references of an object that has only one owner, of our API group.
func Owned(kind string, owner client.Object) []metav1.OwnerReference {
	return []metav1.OwnerReference{{APIVersion: v1alpha1.GroupVersion.String(), Kind: kind,
		Name: owner.GetName(), UID: owner.GetUID(), Controller: new(true)}}
}

// Belongs reports whether an object was made for an identity: see v1alpha1.AnnotationOwner.
func Belongs(o client.Object, id *v1alpha1.VMIdentity) bool {
	return o.GetAnnotations()[v1alpha1.AnnotationOwner] == string(id.UID)
}

// MetaOf is the metadata of an object that belongs to an identity.
func MetaOf(id *v1alpha1.VMIdentity, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: id.Namespace, Name: name,
		Labels:      map[string]string{v1alpha1.LabelIdentity: id.Name},
		Annotations: map[string]string{v1alpha1.AnnotationOwner: string(id.UID)}}
}

func statusOf(object client.Object) (any, error) {
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	return content["status"], err
}

// SetCondition sets a condition with the generation for which it is true. Its time changes only
// with its status.
func SetCondition(conditions *[]metav1.Condition, generation int64, c metav1.Condition) {
	c.ObservedGeneration = generation
	meta.SetStatusCondition(conditions, c)
}

// Images decides which images may be used.
type Images interface {
	// Refuse returns why the image of an identity may not be used now, or "". When the answer
	// changes, the identity's status changes, too.
	Refuse(ctx context.Context, id *v1alpha1.VMIdentity) (reason, message string, err error)
}

// ImageRefused returns why the image of an identity may not be used now, or "".
func (k Kit) ImageRefused(ctx context.Context, id *v1alpha1.VMIdentity) (reason, message string,
	err error) {
	if k.Images == nil {
		return "", "", nil
	}
	return k.Images.Refuse(ctx, id)
}
