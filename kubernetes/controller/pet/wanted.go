package pet

import (
	"errors"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

const kindPet = "VMPet"

func replicas(pet *v1alpha1.VMPet) int32 {
	if pet.Spec.Running != nil && !*pet.Spec.Running {
		return 0
	}
	return 1
}

func owner(pet *v1alpha1.VMPet) []metav1.OwnerReference {
	return []metav1.OwnerReference{
		*metav1.NewControllerRef(pet, v1alpha1.GroupVersion.WithKind(kindPet))}
}

func labels(pet *v1alpha1.VMPet) map[string]string {
	return map[string]string{v1alpha1.LabelPet: pet.Name}
}

func identitySet(pet *v1alpha1.VMPet) *v1alpha1.VMIdentitySet {
	return &v1alpha1.VMIdentitySet{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(),
			Kind: "VMIdentitySet"},
		ObjectMeta: metav1.ObjectMeta{Namespace: pet.Namespace, Name: pet.Name,
			Labels: labels(pet), OwnerReferences: owner(pet)},
		Spec: *pet.Spec.Disk.DeepCopy(),
	}
}

// statefulSet is the StatefulSet of a pet. It does not use the Go type, because a template may have
// fields of later Kubernetes versions.
func statefulSet(pet *v1alpha1.VMPet) (client.Object, error) {
	var template map[string]any
	if err := json.Unmarshal(pet.Spec.Template.Raw, &template); err != nil || template == nil {
		return nil, errors.New("spec.template: want metadata and spec of a pod")
	}
	for _, add := range []struct{ in, key, value string }{
		{"labels", v1alpha1.LabelPet, pet.Name},
		{"annotations", v1alpha1.AnnotationSet, pet.Name},
		{"annotations", v1alpha1.AnnotationName, pet.Name},
	} {
		path := []string{"metadata", add.in, add.key}
		now, there, err := unstructured.NestedString(template, path...)
		if err == nil && (!there || now == add.value) {
			err = unstructured.SetNestedField(template, add.value, path...)
		} else if err == nil {
			err = fmt.Errorf("it is %q: leave it out, the pet sets it", now)
		}
		if err != nil {
			return nil, fmt.Errorf("spec.template.metadata.%s[%q]: %w", add.in, add.key, err)
		}
	}
	u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
		"replicas": int64(replicas(pet)),
		"selector": map[string]any{
			"matchLabels": map[string]any{v1alpha1.LabelPet: pet.Name}},
		// If there is a headless Service of this name, it gives the pod a DNS name.
		"serviceName": pet.Name,
		"template":    template,
	}}}
	u.SetGroupVersionKind(appsv1.SchemeGroupVersion.WithKind("StatefulSet"))
	u.SetNamespace(pet.Namespace)
	u.SetName(pet.Name)
	u.SetLabels(labels(pet))
	u.SetOwnerReferences(owner(pet))
	return u, nil
}
