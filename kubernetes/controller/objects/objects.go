// Package objects is how every controller writes objects: by server-side apply under one name, and
// a status only if it changed.
package objects

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// Apply makes an object as given, or changes those of its fields that are given, by server-side
// apply (one request). It takes over fields that others own and want to be different. It leaves out
// the status and the fields that the server fills in. Fields with the zero value that are marked
// omitempty count as not given.
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

// PatchStatus writes the status of after if it differs from that of before, and returns whether it
// did. before is the object as it was read. If somebody has written it since, the error is a
// conflict: the conditions of several controllers are in one list, and none may overwrite
// another's.
func PatchStatus(ctx context.Context, c client.Client, before, after client.Object) (bool, error) {
	was, err := status(before)
	if err != nil {
		return false, err
	}
	is, err := status(after)
	if err != nil {
		return false, err
	}
	if equality.Semantic.DeepEqual(was, is) {
		return false, nil
	}
	return true, c.Status().Patch(ctx, after,
		client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}),
		client.FieldOwner(v1alpha1.FieldManager))
}

func status(object client.Object) (any, error) {
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	return content["status"], err
}

// SetCondition sets a condition that was observed at a generation. It returns whether status or
// reason changed: then an event is due. The time changes only with the status.
func SetCondition(conditions *[]metav1.Condition, generation int64, c metav1.Condition) bool {
	c.ObservedGeneration = generation
	old := meta.FindStatusCondition(*conditions, c.Type)
	changed := old == nil || old.Status != c.Status || old.Reason != c.Reason
	meta.SetStatusCondition(conditions, c)
	return changed
}
