package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the group and version of this package's types.
var GroupVersion = schema.GroupVersion{Group: Group, Version: "v1alpha1"}

// AddToScheme makes the types known to a scheme. It returns no error.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion,
		&VMIdentitySet{}, &VMIdentitySetList{},
		&VMIdentity{}, &VMIdentityList{},
		&VMIdentitySnapshot{}, &VMIdentitySnapshotList{},
		&VMPet{}, &VMPetList{},
		&VMImage{}, &VMImageList{},
	)
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
