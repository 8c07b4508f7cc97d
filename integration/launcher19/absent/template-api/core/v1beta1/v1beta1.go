// Package v1beta1 stands for a version of that API.
package v1beta1

import (
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// VirtualMachineTemplate is an object of the API without anything in it.
type VirtualMachineTemplate struct{}

// DeepCopyObject implements runtime.Object.
func (*VirtualMachineTemplate) DeepCopyObject() runtime.Object { return &VirtualMachineTemplate{} }

// GetObjectKind implements runtime.Object.
func (*VirtualMachineTemplate) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }
