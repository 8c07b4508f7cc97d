package webhook

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"gomodules.xyz/jsonpatch/v2"

	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/inject"
)

// handler answers the API server. It reads sets and identities from there, not from a cache, so it
// finds a set that was made just now.
type handler struct {
	reader     client.Reader
	options    inject.Options
	namespaces []string // none: all
}

// mutate gives a new pod its disk, or refuses the pod.
func (h *handler) mutate(ctx context.Context, r admission.Request) admission.Response {
	pod, err := decode(r.Object.Raw, r.Namespace)
	if err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	if r.Operation != admissionv1.Create {
		return admission.Allowed("")
	}
	if err := inject.Strange(pod); err != nil {
		return admission.Denied(err.Error())
	}
	if !inject.Asks(pod) {
		return admission.Allowed("")
	}
	if !h.works(r.Namespace) {
		return admission.Denied(fmt.Sprintf("the controller of kubevirt-disk does not work in "+
			"namespace %q, so the pod would wait for its disk for ever: add the namespace to the "+
			"chart's \"namespaces\", or remove the annotation %s", r.Namespace, api.AnnotationSet))
	}
	sets, err := h.sets(ctx, pod)
	if err != nil {
		return admission.Errored(http.StatusInternalServerError, err)
	}
	identities, err := h.identities(ctx, pod)
	if err != nil {
		return admission.Errored(http.StatusInternalServerError, err)
	}
	options := h.options
	options.Hydrated = make(map[string]bool)
	for name, identity := range identities {
		if options.Hydrated[name], err = h.hydrated(ctx, identity); err != nil {
			return admission.Errored(http.StatusInternalServerError, err)
		}
	}
	before, err := json.Marshal(pod)
	if err != nil {
		return admission.Errored(http.StatusInternalServerError, err)
	}
	if err := inject.Pod(pod, options, slices.Collect(maps.Values(sets))...); err != nil {
		return admission.Denied(err.Error())
	}
	for _, d := range inject.Disks(pod) {
		if identity := identities[d.Identity]; identity != nil {
			if err := inject.Identity(d, sets[d.Set], identity); err != nil {
				return admission.Denied(err.Error())
			}
		}
	}
	after, err := json.Marshal(pod)
	if err != nil {
		return admission.Errored(http.StatusInternalServerError, err)
	}
	// Both come from the same type, so the patch has only the changes that were made here.
	patch, err := jsonpatch.CreatePatch(before, after)
	if err != nil {
		return admission.Errored(http.StatusInternalServerError, err)
	}
	return admission.Patched("", patch...)
}

// validate checks a pod after everything that changes pods has changed it.
func (h *handler) validate(ctx context.Context, r admission.Request) admission.Response {
	pod, err := decode(r.Object.Raw, r.Namespace)
	if err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	if !h.works(r.Namespace) {
		return admission.Allowed("") // it was made before the list of namespaces
	}
	found, err := h.sets(ctx, pod)
	if err != nil {
		return admission.Errored(http.StatusInternalServerError, err)
	}
	sets := slices.Collect(maps.Values(found))
	switch r.Operation {
	case admissionv1.Create:
		if !inject.Asks(pod) {
			return admission.Allowed("")
		}
		err = inject.Made(pod, sets...)
	case admissionv1.Update:
		old, wrong := decode(r.OldObject.Raw, r.Namespace)
		if wrong != nil {
			return admission.Errored(http.StatusBadRequest, wrong)
		}
		err = inject.Changed(old, pod, sets...)
	}
	if err != nil {
		return admission.Denied(err.Error())
	}
	return admission.Allowed("")
}

// works reports whether the controller works in a namespace.
func (h *handler) works(namespace string) bool {
	return len(h.namespaces) == 0 || slices.Contains(h.namespaces, namespace)
}

// sets are the VMIdentitySets that a pod names, as far as they exist, by their names.
func (h *handler) sets(ctx context.Context, pod *corev1.Pod) (map[string]*api.VMIdentitySet,
	error) {
	found := make(map[string]*api.VMIdentitySet)
	for _, d := range inject.Disks(pod) {
		if d.Set == "" || found[d.Set] != nil {
			continue
		}
		set := &api.VMIdentitySet{}
		err := h.reader.Get(ctx, client.ObjectKey{Namespace: pod.Namespace, Name: d.Set}, set)
		if err == nil {
			found[d.Set] = set
		} else if !apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("VMIdentitySet %q cannot be read: %w", d.Set, err)
		}
	}
	return found, nil
}

// identities are the VMIdentities that a pod asks for, as far as they exist, by their names.
func (h *handler) identities(ctx context.Context, pod *corev1.Pod) (map[string]*api.VMIdentity,
	error) {
	found := make(map[string]*api.VMIdentity)
	for _, d := range inject.Disks(pod) {
		if d.Identity == "" {
			continue // it is refused
		}
		identity := &api.VMIdentity{}
		err := h.reader.Get(ctx, client.ObjectKey{Namespace: pod.Namespace, Name: d.Identity},
			identity)
		if err == nil {
			found[d.Identity] = identity
		} else if !apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("VMIdentity %q cannot be read: %w", d.Identity, err)
		}
	}
	return found, nil
}

// hydrated reports whether the claim that an identity has now, and not one before it, has a disk
// that needs its image no more.
func (h *handler) hydrated(ctx context.Context, id *api.VMIdentity) (bool, error) {
	if id.Status.HydratedClaim == "" {
		return false, nil
	}
	claim := &corev1.PersistentVolumeClaim{}
	err := h.reader.Get(ctx, client.ObjectKey{Namespace: id.Namespace,
		Name: api.ClaimName(id.Name)}, claim)
	if err != nil && !apierrors.IsNotFound(err) {
		return false, fmt.Errorf("the claim of VMIdentity %q cannot be read: %w", id.Name, err)
	}
	return err == nil && id.NeedsNoImage(claim.UID), nil
}

// maxValues is about how many values a pod may have. Some of two bytes take hundreds as Go has
// them, and the API server may ask about many pods at once.
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
