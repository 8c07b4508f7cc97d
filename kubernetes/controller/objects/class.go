package objects

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	storagev1 "k8s.io/api/storage/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// One of these is "true" on the storage class of claims without a class.
const (
	annotationDefault     = "storageclass.kubernetes.io/is-default-class"
	annotationDefaultBeta = "storageclass.beta.kubernetes.io/is-default-class"
)

// ClassOf returns the name of the storage class of a disk. For a disk without a class, this is the
// name of the cluster's default class, because another class may become the default later. nil:
// there is none. wrong tells that the disk has an unknown usage type, and lists the known ones with
// their classes.
func (k Kit) ClassOf(ctx context.Context, disk *v1alpha1.DiskSpec) (class *string, wrong string,
	err error) {
	if disk.UsageType != "" {
		name, known := k.Options.UsageTypes[disk.UsageType]
		if !known {
			names := strings.Join(slices.Sorted(maps.Keys(k.Options.UsageTypes)), ", ")
			return nil, fmt.Sprintf("usageType %q is unknown: the controller's --usage-type has %s",
				disk.UsageType, cmp.Or(names, "none")), nil
		}
		return &name, "", nil
	}
	if disk.StorageClassName != nil {
		return disk.StorageClassName, "", nil
	}
	found, err := Class(ctx, k.Client, nil)
	if found == nil || err != nil {
		return nil, "", err
	}
	return &found.Name, "", nil
}

// Class returns the storage class of a claim; nil: there is none. A nil name is the cluster's
// default class, and "" no class: such a claim gets only volumes made by hand.
func Class(ctx context.Context, c client.Reader, name *string) (*storagev1.StorageClass, error) {
	switch {
	case name != nil && *name == "":
		return nil, nil
	case name != nil:
		return Find[storagev1.StorageClass](ctx, c, "StorageClass", client.ObjectKey{Name: *name})
	}
	var all storagev1.StorageClassList
	if err := c.List(ctx, &all); err != nil {
		return nil, err
	}
	// Of several default classes, Kubernetes takes the newest, and of equally old ones the first by
	// name.
	var found *storagev1.StorageClass
	for i := range all.Items {
		one := &all.Items[i]
		notes := one.Annotations
		if (notes[annotationDefault] == "true" || notes[annotationDefaultBeta] == "true") &&
			(found == nil || cmp.Or(found.CreationTimestamp.Compare(one.CreationTimestamp.Time),
				cmp.Compare(one.Name, found.Name)) < 0) {
			found = one
		}
	}
	return found, nil
}

// MissingClass returns why no claim of a storage class gets a volume, or "". class is as for Class.
// user is the kind of the object with the class, for people.
func MissingClass(ctx context.Context, c client.Reader, class *string, user string) (
	string, error) {
	if class != nil && *class == "" {
		return "", nil
	}
	found, err := Class(ctx, c, class)
	switch {
	case found != nil || err != nil:
		return "", err
	case class != nil:
		return fmt.Sprintf("there is no StorageClass %s: make it, or make another %s with "+
			"one that `kubectl get storageclass` lists", *class, user), nil
	}
	return fmt.Sprintf("the cluster has no default StorageClass, and the %s names none: make a "+
		"class the default one, or make another %s with storageClassName", user, user), nil
}
