package controllertest

import (
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Class is a storage class.
func Class(name string) *storagev1.StorageClass {
	return &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// DefaultClass is the storage class of claims that name none.
func DefaultClass() *storagev1.StorageClass {
	c := Class("default")
	c.Annotations = map[string]string{"storageclass.kubernetes.io/is-default-class": "true"}
	return c
}
