package service

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/identity"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/status"
)

// Reconciler serves identities.
type Reconciler struct {
	objects.Kit
	// Ask reads the page /status at an address.
	Ask func(ctx context.Context, address string) (*status.Status, error)
}

// pollInterval is the time between two checks of state that no event announces.
const pollInterval = time.Second

// Reconcile serves one identity, or stops serving it.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var before v1alpha1.VMIdentity
	if err := r.Client.Get(ctx, req.NamespacedName, &before); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if r.Options.Off(objects.Services) {
		return ctrl.Result{}, r.sayOff(ctx, &before)
	}
	wanted := before.Spec.Attachment == v1alpha1.Service && before.DeletionTimestamp == nil
	id := before.DeepCopy()
	var result ctrl.Result
	var err error
	switch has := controllerutil.ContainsFinalizer(&before, v1alpha1.FinalizerService); {
	case !wanted && !has:
		return ctrl.Result{}, r.withdraw(ctx, &before)
	case !wanted:
		gone := false
		if gone, err = r.remove(ctx, id); gone && err == nil {
			if err := objects.PatchStatus(ctx, r.Client, &before, id); err != nil {
				return ctrl.Result{}, client.IgnoreNotFound(err)
			}
			return ctrl.Result{}, r.SetFinalizer(ctx, id, v1alpha1.FinalizerService, false)
		}
		result.RequeueAfter = 10 * pollInterval
	case !has:
		return ctrl.Result{}, r.SetFinalizer(ctx, &before, v1alpha1.FinalizerService, true)
	case before.Status.ClaimName == "" || before.Status.SecretName == "":
		return ctrl.Result{}, nil // a change of the status triggers another reconcile
	default:
		var poll bool
		if poll, err = r.serve(ctx, id); poll {
			result.RequeueAfter = pollInterval
		}
	}
	return result, cmp.Or(r.ReportAs(ctx, &before, id, eventType), err)
}

// sayOff records in the status of an identity that it is not served.
func (r *Reconciler) sayOff(ctx context.Context, before *v1alpha1.VMIdentity) error {
	has := controllerutil.ContainsFinalizer(before, v1alpha1.FinalizerService)
	if before.Spec.Attachment != v1alpha1.Service && has {
		return nil
	} else if before.Spec.Attachment != v1alpha1.Service {
		return r.withdraw(ctx, before)
	}
	id := before.DeepCopy()
	message := "attachment Service is turned off (--without=services): use attachment Sidecar"
	if has {
		message += "; this disk can be deleted when it is turned on"
	}
	set(id, servedCondition(v1alpha1.ReasonInvalid, message))
	return r.ReportAs(ctx, before, id, eventType)
}

// withdraw takes condition Served from an identity that is not to be served, and never was.
func (r *Reconciler) withdraw(ctx context.Context, before *v1alpha1.VMIdentity) error {
	id := before.DeepCopy()
	apimeta.RemoveStatusCondition(&id.Status.Conditions, v1alpha1.ConditionServed)
	return r.Report(ctx, before, id)
}

// serve makes the objects that serve an identity, and records their state in its status. It returns
// whether to check again soon.
func (r *Reconciler) serve(ctx context.Context, id *v1alpha1.VMIdentity) (poll bool, err error) {
	service, deployment := &corev1.Service{}, &appsv1.Deployment{}
	key := client.ObjectKey{Namespace: id.Namespace, Name: Name(id.Name)}
	at := client.ObjectKey{Namespace: id.Namespace, Name: serviceName(id.Name)}
	for _, one := range []struct {
		client.Object
		at client.ObjectKey
	}{{service, at}, {deployment, key}} {
		if err := client.IgnoreNotFound(r.Client.Get(ctx, one.at, one.Object)); err != nil {
			return false, err
		}
		if one.GetResourceVersion() != "" && !objects.Belongs(one.Object, id) {
			kind := objects.KindOf(one.Object)
			return false, noted(id, servedCondition, "the "+kind+" "+one.at.Name,
				apierrors.NewAlreadyExists(schema.GroupResource{Resource: kind}, one.at.Name))
		}
	}
	server := r.Options.Server
	image, err := r.needsImage(ctx, id)
	if err != nil {
		return false, err
	}
	if deployment.ResourceVersion != "" {
		server = serverOf(deployment)
		// The server is restarted without the image when no pod uses the disk.
		image = image || id.Status.UsedBy != nil && hasImage(deployment)
	} else if reason, message, err := r.ImageRefused(ctx, id); err != nil {
		return false, err
	} else if reason != "" {
		set(id, servedCondition(reason, message))
		return false, nil
	}
	want, err := newDeployment(id, server, image)
	if err != nil {
		set(id, servedCondition(v1alpha1.ReasonInvalid, err.Error()))
		return false, nil
	}
	wantService := newService(id)
	made, err := r.Make(ctx, service, wantService)
	if err != nil {
		return false, noted(id, servedCondition, "the Service "+at.Name, err)
	}
	if made {
		service = wantService // now with the fields that the API server sets
	}
	if deployment.ResourceVersion == "" {
		made, err := identity.MakeSecret(ctx, r.Client, id)
		if err != nil {
			return false, noted(id, servedCondition, "the secret "+id.Status.SecretName, err)
		}
		if made {
			objects.Event(r.Events, id, nil, v1alpha1.ReasonSecretMissing,
				identity.SecretMissing(id))
		}
		if err := identity.MakeNBDSecret(ctx, r.Client, id, host(id)); err != nil {
			return false, noted(id, servedCondition,
				"the secret "+v1alpha1.NBDSecretName(id.Name), err)
		}
	}
	if deployment.ResourceVersion != "" && hasImage(deployment) != image {
		// A smaller apply does not remove fields of the create. The change triggers another
		// reconcile.
		return false, objects.Change(ctx, r.Client, deployment, func(d *appsv1.Deployment) {
			d.Spec.Template.Spec = want.Spec.Template.Spec
		})
	}
	if _, err := r.Make(ctx, deployment, want); err != nil {
		return false, noted(id, servedCondition, "the Deployment "+key.Name, err)
	}
	id.Status.TargetName = targetName(id)
	id.Status.Portal = net.JoinHostPort(host(id), strconv.Itoa(iscsiPort))
	pod, err := r.pod(ctx, r.Client, id)
	if err != nil {
		return false, err
	}
	set(id, served(deployment, pod))
	if address := service.Spec.ClusterIP; address != "" {
		volume, err := r.volume(ctx, id, address)
		if volume != nil {
			set(id, volume)
		} else if err == nil {
			apimeta.RemoveStatusCondition(&id.Status.Conditions, v1alpha1.ConditionVolumeReady)
		}
		if err != nil {
			return false, err
		}
	}
	if pod != nil && !ready(pod) {
		pod = nil
	}
	handover, poll, err := r.handover(ctx, id, pod)
	if handover != nil {
		set(id, handover)
	}
	return poll, err
}

func (r *Reconciler) needsImage(ctx context.Context, id *v1alpha1.VMIdentity) (bool, error) {
	claim, err := objects.Claim(ctx, r.Client, id)
	return !(id.Spec.Population == v1alpha1.Snapshot || claim != nil &&
		id.NeedsNoImage(claim.UID)), err
}

// pod returns the pod that serves an identity, or nil. A pod that is ending counts only if there is
// no other.
func (r *Reconciler) pod(ctx context.Context, from client.Reader, id *v1alpha1.VMIdentity) (
	*corev1.Pod, error) {
	var all corev1.PodList
	if err := from.List(ctx, &all, client.InNamespace(id.Namespace),
		client.MatchingLabels(selector(id))); err != nil {
		return nil, err
	}
	var found *corev1.Pod
	for i := range all.Items {
		pod := &all.Items[i]
		if !objects.Finished(pod) && (found == nil || pod.DeletionTimestamp == nil) {
			found = pod
		}
	}
	return found, nil
}

func ready(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

func served(d *appsv1.Deployment, pod *corev1.Pod) *metav1.Condition {
	switch {
	case pod != nil && ready(pod) && pod.DeletionTimestamp == nil:
		c := servedCondition(v1alpha1.ReasonServing,
			fmt.Sprintf("pod %s serves the disk", pod.Name))
		c.Status = metav1.ConditionTrue
		return c
	case pod != nil && pod.DeletionTimestamp != nil:
		return servedCondition(v1alpha1.ReasonStopping, fmt.Sprintf("pod %s is ending", pod.Name))
	case pod != nil && pod.Spec.NodeName == "":
		return servedCondition(v1alpha1.ReasonStarting, fmt.Sprintf("pod %s has no node yet; if "+
			"that lasts, `kubectl describe pod %s` says why", pod.Name, pod.Name))
	case pod != nil:
		return servedCondition(v1alpha1.ReasonStarting, fmt.Sprintf("pod %s is starting; if that "+
			"lasts, `kubectl describe pod %s` says why", pod.Name, pod.Name))
	}
	for _, c := range d.Status.Conditions {
		if c.Type == appsv1.DeploymentReplicaFailure && c.Status == corev1.ConditionTrue {
			return servedCondition(v1alpha1.ReasonFailed, "the server has no pod: "+c.Message)
		}
	}
	return servedCondition(v1alpha1.ReasonStarting, "the server has no pod yet")
}

func servedCondition(reason, message string) *metav1.Condition {
	return &metav1.Condition{Type: v1alpha1.ConditionServed, Status: metav1.ConditionFalse,
		Reason: reason, Message: message}
}

func set(id *v1alpha1.VMIdentity, c *metav1.Condition) {
	objects.SetCondition(&id.Status.Conditions, id.Generation, *c)
}

// noted records in the status how a person can solve a failed request. The error causes another
// try.
func noted(id *v1alpha1.VMIdentity, condition func(reason, message string) *metav1.Condition,
	what string, err error) error {
	c, err := failed(condition, what, err)
	if c != nil {
		set(id, c)
	}
	return err
}

func hasCondition(id *v1alpha1.VMIdentity, name string) bool {
	return apimeta.FindStatusCondition(id.Status.Conditions, name) != nil
}

// eventType is the type of the event for a reason, or "" if the reason is temporary.
func eventType(reason string) string {
	switch reason {
	case v1alpha1.ReasonStarting, v1alpha1.ReasonClaimPending, v1alpha1.ReasonHandoverPending:
		return ""
	}
	return cmp.Or(objects.EventType(reason), corev1.EventTypeNormal)
}

// Setup adds the controller to a manager, whose cache has the Deployments and Services with
// v1alpha1.LabelIdentity.
func Setup(mgr ctrl.Manager, kit objects.Kit) error {
	r := &Reconciler{Kit: kit, Ask: objects.ReadStatus}
	b := r.ForAsking(mgr, "service", &v1alpha1.VMIdentity{})
	if r.Options.Off(objects.Services) {
		return b.Complete(objects.Reconciler(r))
	}
	return b.
		Watches(&appsv1.Deployment{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(v1alpha1.LabelIdentity))).
		Watches(&corev1.Service{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(v1alpha1.LabelIdentity))).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(v1alpha1.LabelServer))).
		Watches(&corev1.PersistentVolumeClaim{}, handler.EnqueueRequestsFromMapFunc(
			objects.ByLabel(labelVolume))).
		Complete(objects.Reconciler(r))
}
