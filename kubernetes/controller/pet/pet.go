package pet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// Reconciler makes the objects of a VMPet.
type Reconciler struct{ objects.Kit }

// Setup adds the controller to a manager.
func Setup(mgr ctrl.Manager, kit objects.Kit) error {
	r := &Reconciler{kit}
	b := r.For(mgr, "pet", &v1alpha1.VMPet{})
	if r.Options.Off(objects.Pets) {
		return b.Complete(objects.Reconciler(r))
	}
	// The identity of a pet has the pet's name.
	ofIdentity := func(_ context.Context, o client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(o)}}
	}
	return b.Owns(&v1alpha1.VMIdentitySet{}).
		Owns(&appsv1.StatefulSet{}).
		Watches(&v1alpha1.VMIdentity{}, handler.EnqueueRequestsFromMapFunc(ofIdentity)).
		Complete(objects.Reconciler(r))
}

// Reconcile makes the objects of a pet and writes its status.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var pet v1alpha1.VMPet
	if err := r.Client.Get(ctx, req.NamespacedName, &pet); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if pet.DeletionTimestamp != nil {
		return ctrl.Result{}, nil // its objects are collected
	}
	ready, err := r.apply(ctx, &pet)
	if err != nil && ready == nil {
		return ctrl.Result{}, err
	}
	after := pet.DeepCopy()
	after.Status.ObservedGeneration = pet.Generation
	after.Status.Ready = ready.Status == metav1.ConditionTrue
	objects.SetCondition(&after.Status.Conditions, pet.Generation, *ready)
	err = cmp.Or(r.ReportAs(ctx, &pet, after, eventType), err)
	if err == nil && ready.Reason == v1alpha1.ReasonFailed {
		// No event announces the end of an object of another owner.
		return ctrl.Result{RequeueAfter: time.Minute}, nil
	}
	return ctrl.Result{}, err
}

func eventType(reason string) string {
	return cmp.Or(objects.EventType(reason), corev1.EventTypeNormal)
}

// apply makes the set and the StatefulSet of a pet. It returns condition Ready, or nil if the state
// is unknown, and an error if another try may help.
func (r *Reconciler) apply(ctx context.Context, pet *v1alpha1.VMPet) (*metav1.Condition, error) {
	if r.Options.Off(objects.Pets) {
		return invalid(errors.New("pets are turned off (--without=pets): make a VMIdentitySet " +
			"and a StatefulSet instead")), nil
	}
	set, workload := &v1alpha1.VMIdentitySet{}, &appsv1.StatefulSet{}
	wantedSet := identitySet(pet)
	wanted, err := statefulSet(pet)
	if err != nil {
		return invalid(err), nil
	}
	// Make the set first: without it, admission refuses the pod.
	all := []struct{ have, want client.Object }{{set, wantedSet}, {workload, wanted}}
	for _, one := range all {
		err := r.Client.Get(ctx, client.ObjectKeyFromObject(pet), one.have)
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return nil, err
		case !metav1.IsControlledBy(one.have, pet):
			return foreign(pet, one.want, one.have), nil
		}
	}
	if workload.Spec.Replicas != nil && *workload.Spec.Replicas != replicas(pet) {
		workload.SetAnnotations(nil) // it was scaled: apply it again
	}
	for _, one := range all {
		if _, err := objects.Ensure(ctx, r.Client, one.have, one.want); err != nil {
			return refused(one.want, err)
		}
	}
	return r.state(ctx, pet, workload)
}

// foreign is the condition of a pet whose name is taken.
func foreign(pet *v1alpha1.VMPet, want, have client.Object) *metav1.Condition {
	said := "another object or a person made it: give the pet another name, or delete that object"
	for _, owner := range have.GetOwnerReferences() {
		if owner.Kind == kindPet && owner.Name == pet.Name && owner.UID != pet.UID {
			said = "it belongs to a deleted pet of this name: this pet goes on when it is gone"
		}
	}
	return &metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse,
		Reason: v1alpha1.ReasonFailed, Message: fmt.Sprintf("there is a %s %s already; %s",
			want.GetObjectKind().GroupVersionKind().Kind, have.GetName(), said)}
}

func invalid(err error) *metav1.Condition {
	return &metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse,
		Reason: v1alpha1.ReasonInvalid, Message: err.Error()}
}

// refused returns the condition after a failed request. If the API server finds the pet invalid,
// there is no other try until the pet changes. A temporary error has no condition.
func refused(want client.Object, err error) (*metav1.Condition, error) {
	what := "the " + want.GetObjectKind().GroupVersionKind().Kind
	reason, message := objects.Refused(err, what)
	switch err = fmt.Errorf("%s: %w", what, err); reason {
	case "":
		return nil, err
	case v1alpha1.ReasonInvalid:
		return invalid(errors.New(message)), nil
	}
	c := invalid(errors.New(message))
	c.Reason = v1alpha1.ReasonFailed
	return c, err
}

// state returns condition Ready of a pet whose objects exist.
func (r *Reconciler) state(ctx context.Context, pet *v1alpha1.VMPet,
	workload *appsv1.StatefulSet) (*metav1.Condition, error) {
	c := &metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse,
		Reason: v1alpha1.ReasonStarting}
	pod := pet.Name + "-0"
	switch {
	case replicas(pet) == 0 && workload.Status.Replicas > 0:
		c.Reason, c.Message = v1alpha1.ReasonStopping, fmt.Sprintf("pod %s is ending", pod)
		return c, nil
	case replicas(pet) == 0:
		c.Reason = v1alpha1.ReasonStopped
		c.Message = "running is false: the machine is off, and its disk stays"
		return c, nil
	case workload.Status.ReadyReplicas > 0:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonReady
		c.Message = fmt.Sprintf("pod %s is ready", pod)
		return c, nil
	case workload.Status.Replicas == 0:
		c.Message = fmt.Sprintf("pod %s is not there yet; if that lasts, \"kubectl describe "+
			"statefulset %s\" tells why", pod, pet.Name)
		return c, nil
	}
	var identity v1alpha1.VMIdentity
	err := r.Client.Get(ctx, client.ObjectKeyFromObject(pet), &identity)
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, err
	}
	c.Message = fmt.Sprintf("pod %s is starting; \"kubectl describe pod %s\" tells what it waits "+
		"for", pod, pod)
	for _, one := range identity.Status.Conditions {
		if one.Type == v1alpha1.ConditionReady && one.Status != metav1.ConditionTrue {
			c.Message = fmt.Sprintf("pod %s waits for its disk: %s", pod, one.Message)
		}
	}
	return c, nil
}
