package service

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// status is the part of a daemon's page /status that this package reads.
type status struct {
	Handover *struct {
		Asked string `json:"asked"`
		Done  string `json:"done"`
		Error string `json:"error"`
	} `json:"handover"`
	Sessions []struct {
		Initiator string `json:"initiator"`
	} `json:"sessions"`
}

// ask reads the page of the daemon in a pod. If known is false, the answer makes another reconcile.
func (r *Reconciler) ask(ctx context.Context, id *v1alpha1.VMIdentity, pod *corev1.Pod) (
	s *status, known bool, err error) {
	return r.aside.Ask(ctx, client.ObjectKeyFromObject(id), pod.UID,
		func(ctx context.Context) (*status, error) {
			s := &status{}
			return s, objects.ReadStatus(ctx, r.address(pod), s)
		})
}

// address is that of the pages of a pod.
func (r *Reconciler) address(pod *corev1.Pod) string {
	if r.Options.Pages != nil {
		return r.Options.Pages(pod)
	}
	return objects.PagesAddress(pod)
}
