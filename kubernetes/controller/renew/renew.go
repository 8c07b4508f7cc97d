// Package renew lets the disk of a VMIdentity begin anew from another image, when its owner asks
// for that by v1alpha1.AnnotationRenew. A disk is what was written over its image, so all of that
// goes: nobody else asks for it, and a tag never does.
//
// # Steps, and a controller that is killed between them
//
// Each step is one write, and the state says which one comes next:
//
//  1. status.renew is written when nobody has the disk, and the registry has the image and the
//     policy admits it. The status is written against the version that was read, as that by which a
//     pod gets the disk, so one of them loses. From here on, no pod gets the disk, and packages
//     identity and export leave it alone.
//  2. Package service ends the server of the disk, if it has one.
//  3. Who may have the disk is looked up once more, from the API server. Snapshots and clones look
//     for status.renew after they have announced themselves, so one of both sees the other. Then
//     the claim is deleted. Until here, it can be taken back: the annotation is removed or changed,
//     or somebody has the disk.
//  4. When the claim is gone, spec.image changes. The API server allows that to status.renew.image
//     alone.
//  5. In one write, the status forgets the former disk and status.renew. Package identity then
//     makes a claim as for a new identity.
//  6. The annotation is removed. One with the digest that the disk has asks for nothing.
//
// A claim says from which image it was made (v1alpha1.AnnotationContent). Only one that was made
// from the former image is deleted here, and only one that was made from the present image is used
// by package identity. So a cache that is late takes none for the other.
package renew

import (
	"context"
	"fmt"
	"regexp"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/source"
)

// Reconciler renews disks.
type Reconciler struct {
	Client client.Client
	// Live reads from the API server, because the cache may be late.
	Live   client.Reader
	Events events.EventRecorder
	// Admit returns why an image must not be used in a namespace now, or "". It asks the registry.
	Admit func(ctx context.Context, namespace, image string) (reason, message string, err error)
}

// Setup adds the controller to a manager. The rest of r is as it shall be.
func Setup(mgr ctrl.Manager, r Reconciler, concurrency int) error {
	r.Client, r.Live = mgr.GetClient(), mgr.GetAPIReader()
	r.Events = mgr.GetEventRecorder(v1alpha1.FieldManager)
	return ctrl.NewControllerManagedBy(mgr).
		Named("renew").
		For(&v1alpha1.VMIdentity{}).
		Owns(&corev1.PersistentVolumeClaim{}).
		// The end of a pod may free the disk.
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(objects.Identities)).
		WithOptions(objects.Working(concurrency)).
		Complete(objects.Reconciler(&r))
}

// When to look again: at what no event announces, and at what somebody has to mend.
const (
	look   = 10 * time.Second
	seldom = time.Minute
)

// said is what condition Renewed says, and when to look again.
type said struct {
	reason, message string
	again           time.Duration
}

func say(again time.Duration, reason, format string, args ...any) *said {
	return &said{reason, fmt.Sprintf(format, args...), again}
}

// Reconcile does the next step for one identity.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	id, err := objects.Find[v1alpha1.VMIdentity](ctx, r.Client, "VMIdentity", req.NamespacedName)
	if id == nil || err != nil || !concerned(id) {
		return ctrl.Result{}, err
	}
	before, err := objects.Find[v1alpha1.VMIdentity](ctx, r.Live, "VMIdentity", req.NamespacedName)
	if before == nil || err != nil || !concerned(before) {
		return ctrl.Result{}, err
	}
	if before.Status.Renew != nil && id.Status.Renew == nil {
		return ctrl.Result{}, nil // see clone. When the cache has it, this is another request
	}
	id = before.DeepCopy()
	s, err := r.step(ctx, before, id)
	if err != nil {
		return ctrl.Result{}, err
	}
	if s == nil {
		s = &said{}
		if !meta.IsStatusConditionTrue(id.Status.Conditions, v1alpha1.ConditionRenewed) {
			meta.RemoveStatusCondition(&id.Status.Conditions, v1alpha1.ConditionRenewed)
		}
	} else {
		c := metav1.Condition{Type: v1alpha1.ConditionRenewed, Status: metav1.ConditionFalse,
			Reason: s.reason, Message: s.message}
		if s.reason == v1alpha1.ReasonRenewed {
			c.Status = metav1.ConditionTrue
		}
		objects.SetCondition(&id.Status.Conditions, id.Generation, c)
	}
	if err := objects.PatchStatus(ctx, r.Client, before, id); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	objects.Tell(r.Events, id, before.Status.Conditions, id.Status.Conditions)
	return ctrl.Result{RequeueAfter: s.again}, nil
}

// concerned reports whether there is anything to do, or to say no longer.
func concerned(id *v1alpha1.VMIdentity) bool {
	_, asked := id.Annotations[v1alpha1.AnnotationRenew]
	c := meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionRenewed)
	return id.DeletionTimestamp == nil && (asked || id.Status.Renew != nil ||
		c != nil && c.Status != metav1.ConditionTrue)
}

// step does the next step, and changes the status of id. nil: nobody asks for anything.
func (r *Reconciler) step(ctx context.Context, before, id *v1alpha1.VMIdentity) (*said, error) {
	digest, asked := id.Annotations[v1alpha1.AnnotationRenew]
	switch {
	case id.Status.Renew == nil && !asked:
		return nil, nil
	case id.Status.Renew == nil && v1alpha1.DigestOf(id.Spec.Image) == digest:
		return r.done(ctx, before)
	case id.Status.Renew == nil:
		return r.begin(ctx, id, digest)
	case id.Spec.Image == id.Status.Renew.Image:
		return finish(id), nil
	}
	return r.replace(ctx, before, id, digest)
}

// done removes the annotation of an identity that has the image already.
func (r *Reconciler) done(ctx context.Context, id *v1alpha1.VMIdentity) (*said, error) {
	c := meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionRenewed)
	if c == nil || c.Status != metav1.ConditionTrue {
		// The change makes another request.
		return say(0, v1alpha1.ReasonRenewed, "the disk begins from %s already: nothing was "+
			"changed", id.Spec.Image), nil
	}
	return &said{reason: c.Reason, message: c.Message}, objects.Change(ctx, r.Client, id,
		func(id *v1alpha1.VMIdentity) { delete(id.Annotations, v1alpha1.AnnotationRenew) })
}

// clone returns an identity that begins from one, as that agrees, and has no volume yet, or "". The
// cache does, as it has status.renew: an identity that comes to it later sees that there. One that
// has no claim counts here: a claim that is being made has the name of the former disk's claim, and
// would be cloned from the new disk.
func (r *Reconciler) clone(ctx context.Context, id *v1alpha1.VMIdentity) (string, error) {
	var clones v1alpha1.VMIdentityList
	from := v1alpha1.DiskSource{Identity: v1alpha1.SourceName(id.Name)}
	if err := r.Client.List(ctx, &clones, client.InNamespace(id.Namespace),
		client.MatchingFields{source.Index: from.String()}); err != nil {
		return "", fmt.Errorf("VMIdentities: %w", err)
	}
	for i := range clones.Items {
		if c := &clones.Items[i]; c.DeletionTimestamp == nil && id.Spec.MayBeClonedBy(c.Name) &&
			!meta.IsStatusConditionTrue(c.Status.Conditions, v1alpha1.ConditionBound) {
			return c.Name, nil
		}
	}
	return "", nil
}

var digests = regexp.MustCompile(`^sha256:[a-f0-9]{64}$`)

// begin gives the disk to the renewal, if nobody has it and nothing speaks against that.
func (r *Reconciler) begin(ctx context.Context, id *v1alpha1.VMIdentity, digest string) (*said,
	error) {
	invalid := func(format string, args ...any) (*said, error) {
		return say(seldom, v1alpha1.ReasonInvalid, "the disk stays as it is: "+format, args...), nil
	}
	switch {
	case !digests.MatchString(digest):
		return invalid("the annotation %s must be the digest of an image, as sha256:...",
			v1alpha1.AnnotationRenew)
	case id.Spec.Source != nil:
		return invalid("it begins from another disk, %s: make another VMIdentity", id.Spec.Source)
	case id.Spec.Population != v1alpha1.Snapshot && id.Spec.Attachment != v1alpha1.Service:
		return invalid("its pods have the image of their set as a volume. Only a disk with " +
			"population Snapshot or attachment Service begins anew")
	case id.Spec.SetName == "":
		return invalid("it is of no VMIdentitySet, which would say from which images it may begin")
	case id.Status.CreationTime == nil:
		return invalid("there is none yet. Delete this VMIdentity: its pod gets one from what " +
			"the set begins from now")
	}
	set, err := objects.Find[v1alpha1.VMIdentitySet](ctx, r.Client, "VMIdentitySet",
		client.ObjectKey{Namespace: id.Namespace, Name: id.Spec.SetName})
	if err != nil {
		return nil, err
	}
	if set == nil {
		return invalid("there is no VMIdentitySet %s", id.Spec.SetName)
	}
	image := set.ImageBy(digest)
	if image == "" ||
		v1alpha1.RepositoryOf(image) != v1alpha1.RepositoryOf(id.Spec.Image) {
		return invalid("VMIdentitySet %s neither has nor had the image %s@%s. Its new disks begin "+
			"from %s", set.Name, v1alpha1.RepositoryOf(id.Spec.Image), digest, set.NewImage())
	}
	claim, err := r.claim(ctx, id)
	if err != nil {
		return nil, err
	}
	if claim == nil || !has(claim, id) {
		return invalid("its claim %s is not there, or not as it was made",
			v1alpha1.ClaimName(id.Name))
	}
	if s, err := r.busy(ctx, id, false); s != nil || err != nil {
		return s, err
	}
	reason, message, err := r.Admit(ctx, id.Namespace, image)
	if err != nil {
		return nil, err
	}
	if reason != "" {
		return say(seldom, reason, "the disk stays as it is, because %s is not used: %s", image,
			message), nil
	}
	id.Status.Renew = &v1alpha1.RenewStatus{Image: image, From: id.Spec.Image}
	if set.Spec.Follow != nil {
		id.Status.Renew.FollowedTag = set.Spec.Follow.Tag
	}
	s := say(0, v1alpha1.ReasonRenewing, "the disk begins anew from %s: what guests have written "+
		"to the one from %s is deleted", image, id.Spec.Image)
	id.Status.Ready = false
	objects.SetCondition(&id.Status.Conditions, id.Generation, metav1.Condition{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: s.reason,
		Message: s.message})
	return s, nil // the change makes another request
}

// busy says who has the disk, or needs it first. server says that its own server counts, too.
func (r *Reconciler) busy(ctx context.Context, id *v1alpha1.VMIdentity, server bool) (*said,
	error) {
	inUse := func(format string, args ...any) (*said, error) {
		return say(look, v1alpha1.ReasonInUse, "the disk begins anew later: "+format, args...), nil
	}
	if u := id.Status.UsedBy; u != nil {
		return inUse("pod %s uses it", u.Name)
	}
	pods, err := objects.PodsOf(ctx, r.Live, id)
	if err != nil {
		return nil, err
	}
	for i := range pods {
		if p := &pods[i]; !objects.Finished(p) && !objects.Gated(p, id.Name) &&
			(server || p.Labels[v1alpha1.LabelServer] == "") {
			return inUse("pod %s uses it", p.Name)
		}
	}
	if e := id.Status.Export; e != nil && e.Running ||
		id.Spec.Export != nil && id.Spec.Attachment != v1alpha1.Service &&
			(e == nil || e.Digest == "") {
		return inUse("its export comes first. If nobody needs that, remove spec.export")
	}
	clone, err := r.clone(ctx, id)
	if err != nil {
		return nil, err
	}
	if clone != "" {
		return inUse("VMIdentity %s begins from it and has no volume yet: it gets one when a pod "+
			"starts with it, or delete it", clone)
	}
	var snapshots v1alpha1.VMIdentitySnapshotList
	if err := r.Live.List(ctx, &snapshots, client.InNamespace(id.Namespace)); err != nil {
		return nil, fmt.Errorf("VMIdentitySnapshots: %w", err)
	}
	for i := range snapshots.Items {
		if s := &snapshots.Items[i]; string(s.Spec.IdentityName) == id.Name &&
			!s.Status.ReadyToUse && s.DeletionTimestamp == nil {
			return inUse("VMIdentitySnapshot %s of it is not ready: wait for it, or delete it",
				s.Name)
		}
	}
	return nil, nil
}

// claim returns the claim with the name of the identity's, as the API server has it; nil: there is
// none.
func (r *Reconciler) claim(ctx context.Context, id *v1alpha1.VMIdentity) (
	*corev1.PersistentVolumeClaim, error) {
	return objects.Find[corev1.PersistentVolumeClaim](ctx, r.Live, "claim",
		client.ObjectKey{Namespace: id.Namespace, Name: v1alpha1.ClaimName(id.Name)})
}

// has reports whether a claim is that of the identity, made from its image.
func has(claim *corev1.PersistentVolumeClaim, id *v1alpha1.VMIdentity) bool {
	return metav1.IsControlledBy(claim, id) &&
		claim.Annotations[v1alpha1.AnnotationContent] == id.Spec.Content()
}

// replace deletes the claim, and then changes the image.
func (r *Reconciler) replace(ctx context.Context, before, id *v1alpha1.VMIdentity,
	digest string) (*said, error) {
	renewing := func(format string, args ...any) (*said, error) {
		return say(look, v1alpha1.ReasonRenewing, format, args...), nil
	}
	c := meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionRenewed)
	claim, err := r.claim(ctx, id)
	switch {
	case err != nil || c == nil: // the condition came with status.renew
		return nil, err
	case claim == nil || !metav1.IsControlledBy(claim, id):
		return &said{reason: c.Reason, message: c.Message}, objects.Change(ctx, r.Client, before,
			func(id *v1alpha1.VMIdentity) {
				id.Spec.Image = id.Status.Renew.Image
				id.Spec.FollowedTag = id.Status.Renew.FollowedTag
			})
	case claim.DeletionTimestamp != nil:
		return renewing("the claim %s of the former disk is being deleted: `kubectl describe pvc "+
			"%[1]s` says what still has it", claim.Name)
	case v1alpha1.DigestOf(id.Status.Renew.Image) != digest:
		id.Status.Renew = nil // the change makes another request
		return nil, nil
	case !has(claim, id):
		return renewing("the claim %s is not as it was made for %s: delete it, or remove the "+
			"annotation %s", claim.Name, id.Spec.Image, v1alpha1.AnnotationRenew)
	case controllerutil.ContainsFinalizer(id, v1alpha1.FinalizerService):
		c := meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionServed)
		if c == nil {
			return renewing("the server of the disk is ending")
		}
		return renewing("the server of the disk ends first: %s", c.Message)
	}
	if s, err := r.busy(ctx, id, true); s != nil || err != nil {
		id.Status.Renew = nil
		return s, err
	}
	if err := objects.DeleteClaim(ctx, r.Client, claim); err != nil {
		return nil, err
	}
	return renewing("the claim %s of the former disk is being deleted", claim.Name)
}

// finish lets the status forget the former disk. A claim is then made as for a new identity.
func finish(id *v1alpha1.VMIdentity) *said {
	m := id.Status.Renew
	id.Status.Renew, id.Status.CreationTime = nil, nil
	id.Status.ClaimName, id.Status.Size, id.Status.NodeName = "", nil, ""
	for _, of := range []string{v1alpha1.ConditionBound, v1alpha1.ConditionPopulated,
		v1alpha1.ConditionHydrated} {
		meta.RemoveStatusCondition(&id.Status.Conditions, of)
	}
	return say(0, v1alpha1.ReasonRenewed, "the disk began anew from %s, and what guests had "+
		"written to the one from %s is gone", m.Image, m.From)
}
