package service

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/status"
)

// ask reads the page of the daemon in a pod. If known is false, the answer makes another reconcile.
func (r *Reconciler) ask(ctx context.Context, id *v1alpha1.VMIdentity, pod *corev1.Pod) (
	page *status.Status, known bool, err error) {
	return r.aside.Ask(ctx, client.ObjectKeyFromObject(id), pod.UID,
		func(ctx context.Context) (*status.Status, error) {
			return objects.ReadStatus(ctx, r.address(pod))
		})
}

// address is that of the pages of a pod.
func (r *Reconciler) address(pod *corev1.Pod) string {
	if r.Options.Pages != nil {
		return r.Options.Pages(pod)
	}
	return objects.PagesAddress(pod)
}
