package service

import (
	"context"

	corev1 "k8s.io/api/core/v1"

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

// ask reads the page of the daemon in a pod.
func (r *Reconciler) ask(ctx context.Context, pod *corev1.Pod) (*status, error) {
	address := r.Options.Pages
	if address == nil {
		address = objects.PagesAddress
	}
	var s status
	if err := objects.ReadStatus(ctx, address(pod), &s); err != nil {
		return nil, err
	}
	return &s, nil
}
