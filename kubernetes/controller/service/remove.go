package service

import (
	"context"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/identity"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// remove stops serving an identity that is being deleted, or that should be served in another way.
// While the disk is in use, it removes nothing, and condition Served names the users. It returns
// whether everything is gone. It asks the API server, because the cache may not have new objects
// yet, and without the finalizer there is no later check.
func (r *Reconciler) remove(ctx context.Context, id *v1alpha1.VMIdentity) (gone bool, err error) {
	users, known, err := r.users(ctx, id)
	if err != nil || !known {
		return false, err
	}
	if len(users) > 0 {
		set(id, servedCondition(v1alpha1.ReasonInUse, fmt.Sprintf("the disk is in use, and served "+
			"until that ends: %s", strings.Join(users, ", "))))
		return false, nil
	}
	var claims corev1.PersistentVolumeClaimList
	if err := r.Live.List(ctx, &claims, client.InNamespace(id.Namespace),
		client.MatchingLabels{labelVolume: id.Name}); err != nil {
		return false, err
	}
	if err := r.dropVolume(ctx, id, claims.Items); err != nil {
		return false, noted(id, servedCondition, "that its volume is deleted", err)
	}
	if len(claims.Items) > 0 {
		set(id, servedCondition(v1alpha1.ReasonInUse, fmt.Sprintf("the disk is served until the "+
			"claim %s is gone: `kubectl describe pvc %s` says which pod has it",
			claims.Items[0].Name, claims.Items[0].Name)))
		return false, nil
	}
	left, err := r.stop(ctx, id)
	if err != nil {
		return false, noted(id, servedCondition, "that its server is deleted", err)
	}
	pod, err := r.pod(ctx, r.Live, id)
	if err != nil || left || pod != nil {
		set(id, servedCondition(v1alpha1.ReasonStopping, "the server is ending"))
		return false, err
	}
	if err := identity.DeleteNBDSecret(ctx, r.Client, id); err != nil {
		return false, err
	}
	id.Status.Portal, id.Status.TargetName, id.Status.Handover = "", "", ""
	for _, name := range []string{v1alpha1.ConditionServed, v1alpha1.ConditionVolumeReady,
		v1alpha1.ConditionHandedOver} {
		apimeta.RemoveStatusCondition(&id.Status.Conditions, name)
	}
	return true, nil
}

// stop deletes the Deployment and the Service of an identity. It returns whether one of them
// remains.
func (r *Reconciler) stop(ctx context.Context, id *v1alpha1.VMIdentity) (left bool, err error) {
	var deployments appsv1.DeploymentList
	var services corev1.ServiceList
	for _, list := range []client.ObjectList{&deployments, &services} {
		if err := r.Live.List(ctx, list, client.InNamespace(id.Namespace),
			client.MatchingLabels{v1alpha1.LabelIdentity: id.Name}); err != nil {
			return false, err
		}
	}
	names := map[client.Object]string{}
	for i := range deployments.Items {
		names[&deployments.Items[i]] = Name(id.Name)
	}
	for i := range services.Items {
		names[&services.Items[i]] = serviceName(id.Name)
	}
	for one, name := range names {
		if one.GetName() != name || !objects.Belongs(one, id) {
			continue // of another owner
		}
		left = true
		if one.GetDeletionTimestamp() == nil {
			uid := one.GetUID()
			if err := client.IgnoreNotFound(r.Client.Delete(ctx, one,
				client.Preconditions{UID: &uid},
				client.PropagationPolicy("Background"))); err != nil {
				return false, err
			}
		}
	}
	return left, nil
}

// users returns the machines that use a disk: pods that name the identity, and initiators that are
// logged in. A disk that is not served has no users. If known is false, condition Served tells that
// its server does not answer.
func (r *Reconciler) users(ctx context.Context, id *v1alpha1.VMIdentity) (users []string,
	known bool, err error) {
	// The cache may not know yet that a pod has left its gate.
	pods, err := objects.PodsOf(ctx, r.Live, id)
	if err != nil {
		return nil, false, err
	}
	for i := range pods {
		pod := &pods[i]
		if pod.Labels[v1alpha1.LabelServer] == "" && !objects.Finished(pod) &&
			!objects.Gated(pod, id.Name) {
			users = append(users, "pod "+pod.Name)
		}
	}
	server, err := r.pod(ctx, r.Live, id)
	if err != nil || server == nil || !ready(server) {
		return users, true, err
	}
	s, err := r.Ask(ctx, objects.PagesAddress(server))
	if err != nil {
		// Do not include the error: it contains times and ports, which differ at each try.
		set(id, servedCondition(v1alpha1.ReasonUnknown, fmt.Sprintf("pod %s does not say who is "+
			"logged in to the disk, so the disk stays: let the controller reach http://%s/status, "+
			"or switch off the node %s if it is lost, and tell Kubernetes", server.Name,
			objects.PagesAddress(server), server.Spec.NodeName)))
		return nil, false, nil
	}
	for _, session := range s.Sessions {
		users = append(users, "initiator "+session.Initiator)
	}
	slices.Sort(users)
	return slices.Compact(users), true, nil
}
