package objects

import (
	"context"
	"fmt"

	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// One of these is "true" on the storage class of claims that name none.
const (
	annotationDefault     = "storageclass.kubernetes.io/is-default-class"
	annotationDefaultBeta = "storageclass.beta.kubernetes.io/is-default-class"
)

// MissingClass returns why no claim of a storage class gets a volume, or "". nil is the cluster's
// default class, and "" no class: such a claim gets only volumes that somebody made by hand. user
// is the kind of the object that names the class, for people.
func MissingClass(ctx context.Context, c client.Reader, class *string, user string) (
	string, error) {
	switch {
	case class != nil && *class == "":
		return "", nil
	case class != nil:
		err := c.Get(ctx, client.ObjectKey{Name: *class}, &storagev1.StorageClass{})
		if apierrors.IsNotFound(err) {
			return fmt.Sprintf("there is no StorageClass %s: make it, or make another %s with "+
				"one that `kubectl get storageclass` lists", *class, user), nil
		}
		return "", err
	}
	var all storagev1.StorageClassList
	if err := c.List(ctx, &all); err != nil {
		return "", err
	}
	for i := range all.Items {
		notes := all.Items[i].Annotations
		if notes[annotationDefault] == "true" || notes[annotationDefaultBeta] == "true" {
			return "", nil
		}
	}
	return fmt.Sprintf("the cluster has no default StorageClass, and the %s names none: make a "+
		"class the default one, or make another %s with storageClassName", user, user), nil
}
