package webhook

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	review "sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"kubevirt.io/disk/internal/testtool"
	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
)

// TestHydrated: a pod whose disk needs its image no more is made without it.
func TestHydrated(t *testing.T) {
	const image = "registry.example.com/fedora@sha256:" +
		"a8dd75ecffd4cdd96072d60c2237b448e0c8b2bc94d57f10fdbc8c481d9005b8"
	set := &api.VMIdentitySet{ObjectMeta: metav1.ObjectMeta{Name: "set"}}
	set.Spec.Image = image
	id := &api.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "vm"}}
	id.Spec.Image = image
	w := controllertest.New(t, nil, set, id)
	h := &handler{reader: w.Base, server: "kubevirt.io:disk"}
	raw := testtool.Must(json.Marshal(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "vm",
		Annotations: map[string]string{api.AnnotationSet: "set"}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "vm", Image: "qemu"}}}}))(t)
	patches := func() string {
		r := h.mutate(t.Context(), review.Request{AdmissionRequest: admissionv1.AdmissionRequest{
			Operation: admissionv1.Create, Namespace: controllertest.Namespace,
			Object: runtime.RawExtension{Raw: raw}}})
		require.True(t, r.Allowed, r.Result)
		var text strings.Builder
		require.NoError(t, json.NewEncoder(&text).Encode(r.Patches))
		return text.String()
	}
	require.Contains(t, patches(), image)
	id.Status.HydratedClaim = "hydrated"
	require.NoError(t, w.Base.Status().Update(t.Context(), id))
	require.Contains(t, patches(), image, "the claim is gone")
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{UID: "restored",
		Namespace: controllertest.Namespace, Name: "vmid-vm"}}
	require.NoError(t, w.Base.Create(t.Context(), claim))
	require.Contains(t, patches(), image, "the claim was restored from a backup")
	require.NoError(t, w.Base.Delete(t.Context(), claim))
	claim.UID, claim.ResourceVersion = "hydrated", ""
	require.NoError(t, w.Base.Create(t.Context(), claim))
	require.Contains(t, patches(), "vmid-vm")
	require.NotContains(t, patches(), image)
	id.Spec.Type = api.Local
	require.NoError(t, w.Base.Update(t.Context(), id))
	require.Contains(t, patches(), image, "the disk may move into another claim")
}

// TestPodOfManyValues: a pod of two bytes for each of a million values is refused before it is
// decoded.
func TestPodOfManyValues(t *testing.T) {
	raw := `{"spec":{"tolerations":[{}` + strings.Repeat(",{}", maxValues+1) + `]}}`
	require.ErrorContains(t, testtool.Err(decode([]byte(raw), "ns")), "more than 65536 values")
}
