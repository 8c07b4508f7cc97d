// Command operator prints what installs KubeVirt's operator, as JSON for kubectl. KubeVirt's own
// code makes it, as it makes the manifests of KubeVirt's releases.
//
//	operator VERSION    the images are localhost/virt-operator:VERSION and so on
package main

import (
	"encoding/json"
	"fmt"
	"os"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/components"
	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/rbac"
)

const (
	namespace = "kubevirt"
	registry  = "localhost"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: operator VERSION")
		os.Exit(2)
	}
	if err := print(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "operator:", err)
		os.Exit(1)
	}
}

func print(version string) error {
	crd, err := components.NewKubeVirtCrd()
	if err != nil {
		return err
	}
	operator := components.NewOperatorDeployment(namespace, registry, "", version, "2", version,
		"", "", "", "", "", "", "", "", "", "", "", registry+"/virt-operator:"+version,
		corev1.PullIfNotPresent)
	one := int32(1)
	operator.Spec.Replicas = &one
	objects := []any{
		&corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
			ObjectMeta: metav1.ObjectMeta{Name: namespace, Labels: map[string]string{
				"kubevirt.io": "", "pod-security.kubernetes.io/enforce": "privileged"}}},
		crd, components.NewKubeVirtPriorityClassCR()}
	for _, object := range rbac.GetAllOperator(namespace) {
		objects = append(objects, object)
	}
	items := []any{}
	for _, object := range append(objects, operator) {
		item, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
		if err != nil {
			return err
		}
		delete(item, "status") // kubectl would apply the empty fields
		items = append(items, item)
	}
	out := json.NewEncoder(os.Stdout)
	out.SetIndent("", " ")
	return out.Encode(map[string]any{"apiVersion": "v1", "kind": "List", "items": items})
}
