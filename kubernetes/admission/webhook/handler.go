package webhook

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	review "sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"gomodules.xyz/jsonpatch/v2"

	"kubevirt.io/disk/kubernetes/admission"
	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// handler answers the API server. It reads sets and identities from there, not from a cache, so it
// finds a new set at once.
type handler struct {
	reader     client.Reader
	server     string   // the image that serves disks
	namespaces []string // none: all
}

// mutate gives a new pod its disk, or refuses the pod.
func (h *handler) mutate(ctx context.Context, r review.Request) review.Response {
	pod, err := decode(r.Object.Raw, r.Namespace)
	if err != nil {
		return review.Errored(http.StatusBadRequest, err)
	}
	disks := admission.Disks(pod)
	if len(disks) > 0 && !h.works(r.Namespace) {
		return review.Denied(fmt.Sprintf("the controller of kubevirt-disk does not work in "+
			"namespace %q, so the pod would wait for its disk for ever: add the namespace to the "+
			"chart's \"namespaces\", or remove the annotation %s", r.Namespace, api.AnnotationSet))
	}
	wanted, err := h.wantedDisks(ctx, pod, disks)
	if err != nil {
		return review.Errored(http.StatusInternalServerError, err)
	}
	before, err := json.Marshal(pod)
	if err != nil {
		return review.Errored(http.StatusInternalServerError, err)
	}
	if err := admission.Pod(pod, h.server, wanted); err != nil {
		return review.Denied(err.Error())
	}
	after, err := json.Marshal(pod)
	if err != nil {
		return review.Errored(http.StatusInternalServerError, err)
	}
	// Both come from the same type, so the patch has only the changes from here.
	patch, err := jsonpatch.CreatePatch(before, after)
	if err != nil {
		return review.Errored(http.StatusInternalServerError, err)
	}
	return review.Patched("", patch...)
}

// validate checks a pod after all other changes by admission.
func (h *handler) validate(ctx context.Context, r review.Request) review.Response {
	pod, err := decode(r.Object.Raw, r.Namespace)
	if err != nil {
		return review.Errored(http.StatusBadRequest, err)
	}
	if !h.works(r.Namespace) {
		return review.Allowed("") // the pod is older than the list of namespaces
	}
	disks, err := h.named(ctx, pod, admission.Disks(pod))
	if err != nil {
		return review.Errored(http.StatusInternalServerError, err)
	}
	switch r.Operation {
	case admissionv1.Create:
		if len(disks) > 0 {
			err = admission.Made(pod, disks)
		}
	case admissionv1.Update:
		old, wrong := decode(r.OldObject.Raw, r.Namespace)
		if wrong != nil {
			return review.Errored(http.StatusBadRequest, wrong)
		}
		err = admission.Changed(old, pod, disks)
	}
	if err != nil {
		return review.Denied(err.Error())
	}
	return review.Allowed("")
}

// works reports whether the controller works in a namespace.
func (h *handler) works(namespace string) bool {
	return len(h.namespaces) == 0 || slices.Contains(h.namespaces, namespace)
}

// named are the disks that a pod asks for, with their VMIdentitySets.
func (h *handler) named(ctx context.Context, pod *corev1.Pod, disks []admission.Disk) (
	all []admission.Wanted, err error) {
	for _, d := range disks {
		set, err := find[api.VMIdentitySet](ctx, h.reader, "VMIdentitySet", pod, d.SetName)
		if err != nil {
			return nil, err
		}
		all = append(all, admission.Wanted{Disk: d, Set: set})
	}
	return all, nil
}

// wantedDisks are the disks that a pod asks for, with their existing objects.
func (h *handler) wantedDisks(ctx context.Context, pod *corev1.Pod, disks []admission.Disk) (
	[]admission.Wanted, error) {
	all, err := h.named(ctx, pod, disks)
	if err != nil {
		return nil, err
	}
	for i := range all {
		d := &all[i]
		d.Identity, err = find[api.VMIdentity](ctx, h.reader, "VMIdentity", pod, d.Name)
		if err != nil {
			return nil, err
		}
		// A disk of type Local may be moved into another claim while the pod waits.
		if d.Identity == nil || d.Identity.Status.HydratedClaim == "" ||
			d.Identity.Spec.Type == api.Local {
			continue
		}
		// The present claim of the disk, and not an earlier one.
		claim, err := find[corev1.PersistentVolumeClaim](ctx, h.reader, "claim", pod,
			api.ClaimName(d.Name))
		if err != nil {
			return nil, err
		}
		d.Hydrated = claim != nil && d.Identity.NeedsNoImage(claim.UID)
	}
	return all, nil
}

// find reads an object of a pod's namespace; nil: there is none.
func find[T any, O interface {
	*T
	client.Object
}](ctx context.Context, from client.Reader, what string, pod *corev1.Pod, name string) (O, error) {
	return objects.Find[T, O](ctx, from, what,
		client.ObjectKey{Namespace: pod.Namespace, Name: name})
}

// maxValues is about how many values a pod may have. A value of two bytes may take hundreds of
// bytes of memory, and the API server may ask about many pods at once.
const maxValues = 64 << 10

func decode(raw []byte, namespace string) (*corev1.Pod, error) {
	if bytes.Count(raw, []byte(",")) > maxValues {
		return nil, fmt.Errorf("the pod has more than %d values", maxValues)
	}
	pod := &corev1.Pod{}
	if err := json.Unmarshal(raw, pod); err != nil {
		return nil, fmt.Errorf("the request has no pod: %w", err)
	}
	pod.Namespace = namespace
	return pod, nil
}
