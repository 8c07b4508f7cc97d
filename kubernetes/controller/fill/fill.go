package fill

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/registry/signature"
	"kubevirt.io/disk/status"
)

// Keys returns the keys for an image that is fetched in a namespace, one of which must have signed
// it, or a reason why the image may not be fetched. No keys: no signature is required.
type Keys func(ctx context.Context, namespace, image string) (keys []signature.Key, reason,
	message string, err error)

// Reconciler fills the claims of a VMImage. Live reads volumes and pods, and claims before a volume
// is given away.
type Reconciler struct {
	objects.Kit
	// Claims reads all claims from a cache, with index indexImage.
	Claims client.Reader
	// Ask asks the pod that fetches a disk for its progress.
	Ask func(ctx context.Context, address string) (status.Progress, error)
	// Keys returns the keys for images. nil: no signature is required.
	Keys Keys

	told objects.Once
}

const (
	// pollInterval is the time between two checks of state that no event announces.
	pollInterval = 5 * time.Second
	// afterFailed is the wait before a failed Job is made again.
	afterFailed = 5 * time.Minute
	// askTime is how long pods may take to report their progress.
	askTime = 2 * time.Second
)

// state is the progress of a claim.
type state struct {
	claim           *corev1.PersistentVolumeClaim
	reason, message string
	progress        string
	requeueAfter    time.Duration // 0: an event announces the next step
	pod             *corev1.Pod   // the pod to ask for its progress; nil: none
}

// after schedules the next check of the claim.
func (s *state) after(d time.Duration) *state {
	s.requeueAfter = d
	return s
}

// is returns the state of a claim with this reason and message.
func is(reason, format string, args ...any) *state {
	return &state{reason: reason, message: fmt.Sprintf(format, args...)}
}

// Reconcile does the next step for each claim of a VMImage.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	before, err := objects.Find[v1alpha1.VMImage](ctx, r.Client, "VMImage", req.NamespacedName)
	if err != nil {
		return ctrl.Result{}, err
	}
	if before != nil && before.DeletionTimestamp != nil {
		before = nil
	}
	var claims corev1.PersistentVolumeClaimList
	if err := r.Claims.List(ctx, &claims, client.InNamespace(req.Namespace),
		client.MatchingFields{indexImage: req.Name}); err != nil {
		return ctrl.Result{}, fmt.Errorf("claims: %w", err)
	}
	var all []*state
	var failed error
	for i := range claims.Items {
		claim := &claims.Items[i]
		s, err := r.step(ctx, req.Name, before, claim)
		// A policy of the cluster may keep volumes, claims or Jobs as they are.
		if reason, message := objects.Refused(err, "a step of the filling"); reason != "" {
			s, err = is(v1alpha1.ReasonFillFailed, "%s", message).after(time.Minute), nil
		}
		if err != nil {
			failed = cmp.Or(failed, fmt.Errorf("claim %s: %w", claim.Name, err))
			continue
		}
		if s != nil {
			s.claim = claim
			all = append(all, s)
		}
	}
	r.progress(ctx, all)
	requeueAfter := time.Duration(0)
	r.tell(all)
	for _, s := range all {
		if s.requeueAfter > 0 && (requeueAfter == 0 || s.requeueAfter < requeueAfter) {
			requeueAfter = s.requeueAfter
		}
	}
	if before != nil && failed == nil {
		image := before.DeepCopy()
		image.Status.Claims = statusOf(all)
		failed = client.IgnoreNotFound(objects.PatchStatus(ctx, r.Client, before, image))
	}
	return ctrl.Result{RequeueAfter: requeueAfter}, failed
}

// maxListed is how many claims a status lists. All are filled.
const maxListed = 100

func statusOf(all []*state) (list []v1alpha1.ClaimStatus) {
	for _, s := range all {
		if s.reason != v1alpha1.ReasonFilled {
			list = append(list, v1alpha1.ClaimStatus{Name: s.claim.Name, UID: s.claim.UID,
				Reason: s.reason, Message: s.message, Progress: s.progress})
		}
	}
	slices.SortFunc(list, func(a, b v1alpha1.ClaimStatus) int {
		return cmp.Compare(a.Name, b.Name)
	})
	return list[:min(len(list), maxListed)]
}

// tell sends an event for each new state of a claim, and at each quarter of the way.
func (r *Reconciler) tell(all []*state) {
	type news struct {
		claim        types.UID
		reason, what string
	}
	for _, s := range all {
		n := news{s.claim.UID, s.reason, s.message}
		if s.reason == v1alpha1.ReasonFilling {
			n.what = quarter(s.progress)
		}
		if r.told.First(n) {
			objects.EventAs(eventType, r.Events, s.claim, nil, s.reason, s.message)
		}
	}
}

func eventType(reason string) string {
	switch reason {
	case v1alpha1.ReasonFilling, v1alpha1.ReasonFilled, v1alpha1.ReasonWaiting:
		return corev1.EventTypeNormal
	}
	return corev1.EventTypeWarning
}

// step does the next step for a claim. nil: there is nothing to do or to report. image is nil if
// there is none.
func (r *Reconciler) step(ctx context.Context, name string, image *v1alpha1.VMImage,
	claim *corev1.PersistentVolumeClaim) (*state, error) {
	if claim.DeletionTimestamp != nil {
		return nil, nil // the garbage collector deletes its objects
	}
	made, err := r.made(ctx, claim)
	if err != nil {
		return nil, err
	}
	switch {
	case claim.Spec.VolumeName != "":
		return r.clean(ctx, name, claim, made)
	case image == nil:
		return is(v1alpha1.ReasonImageMissing, "there is no VMImage %s in the namespace, from "+
			"which the claim is filled: make it", name), nil
	case made.strange != "":
		return is(v1alpha1.ReasonFillFailed, "there is a %s %s that is not of this claim: delete "+
			"it", made.strange, nameOf(claim)).after(pollInterval), nil
	}
	if s, err := r.wait(ctx, claim); s != nil || err != nil {
		return s, err
	}
	image, s, err := r.signed(ctx, image)
	if s != nil || err != nil {
		return s, err
	}
	switch {
	case made.claim == nil:
		return r.create(ctx, newClaim(claim))
	case made.job == nil:
		return r.create(ctx, newJob(image, claim, made.claim.UID, r.Options.Server))
	case made.claim.DeletionTimestamp != nil || made.job.DeletionTimestamp != nil:
		return is(v1alpha1.ReasonFilling, "an earlier try must end first").after(pollInterval), nil
	case made.job.Annotations[annotationWanted] != contentDigest(image, claim, made.claim.UID,
		r.Options.Server):
		return is(v1alpha1.ReasonFilling, "the VMImage has changed, or the claim %s was deleted, "+
				"and the claim is filled anew", made.claim.Name).after(pollInterval),
			r.deleteJob(ctx, made.job)
	}
	switch end := objects.Ended(made.job); end.Type {
	case batchv1.JobComplete:
		return r.give(ctx, claim, made.claim)
	case batchv1.JobFailed:
		return r.failed(ctx, made.job, end)
	}
	return r.running(ctx, made.job)
}

// made has the objects that were made to fill a claim.
type made struct {
	claim   *corev1.PersistentVolumeClaim
	job     *batchv1.Job
	strange string // the kind of an object of another owner with the name
}

func (r *Reconciler) made(ctx context.Context, claim *corev1.PersistentVolumeClaim) (m made,
	err error) {
	key := client.ObjectKey{Namespace: claim.Namespace, Name: nameOf(claim)}
	if m.claim, err = objects.Find[corev1.PersistentVolumeClaim](ctx, r.Claims, "claim",
		key); err != nil {
		return m, err
	}
	if m.job, err = objects.Find[batchv1.Job](ctx, r.Client, "job", key); err != nil {
		return m, err
	}
	if m.claim != nil && !metav1.IsControlledBy(m.claim, claim) {
		m.claim, m.strange = nil, "claim"
	}
	if m.job != nil && !metav1.IsControlledBy(m.job, claim) {
		m.job, m.strange = nil, "Job"
	}
	return m, nil
}

// annotationNode is on a claim: the node that the scheduler has chosen for its first consumer.
const annotationNode = "volume.kubernetes.io/selected-node"

// wait returns why there cannot be a volume yet, or nil.
func (r *Reconciler) wait(ctx context.Context, claim *corev1.PersistentVolumeClaim) (*state,
	error) {
	name := claim.Spec.StorageClassName
	if name != nil && *name == "" {
		return is(v1alpha1.ReasonInvalid, "the claim asks for no StorageClass, and so for a "+
			"volume that is there already: make a claim with a class"), nil
	}
	missing, err := objects.MissingClass(ctx, r.Client, name, "claim")
	if missing != "" || err != nil {
		return is(v1alpha1.ReasonClassMissing, "%s", missing).after(pollInterval), err
	}
	class, err := objects.Class(ctx, r.Client, name)
	if class == nil || err != nil {
		return is(v1alpha1.ReasonWaiting, "there is no StorageClass").after(pollInterval), err
	}
	mode := class.VolumeBindingMode
	if mode != nil && *mode == storagev1.VolumeBindingWaitForFirstConsumer &&
		claim.Annotations[annotationNode] == "" {
		return is(v1alpha1.ReasonWaiting, "the StorageClass %s makes a volume where the first pod "+
			"runs: the claim is filled when a pod with it is scheduled", class.Name), nil
	}
	return nil, nil
}

// signed returns a VMImage with the keys of which one must have signed its image: its own ones that
// the namespace's policy admits, or those of the policy if it names none. A state tells why the
// image may not be fetched.
func (r *Reconciler) signed(ctx context.Context, image *v1alpha1.VMImage) (*v1alpha1.VMImage,
	*state, error) {
	if r.Keys == nil {
		return image, nil, nil
	}
	keys, reason, message, err := r.Keys(ctx, image.Namespace, image.Spec.Image)
	if err != nil {
		return nil, nil, err
	}
	if reason != "" {
		return nil, is(reason, "%s", message).after(time.Minute), nil
	}
	if len(keys) == 0 {
		return image, nil, nil
	}
	var own []signature.Key
	if len(image.Spec.Keys) > 0 {
		own, err = signature.ParseKeys([]byte(strings.Join(image.Spec.Keys, "\n")))
		if err != nil {
			return nil, is(v1alpha1.ReasonInvalid, "the keys of the VMImage: %v", err), nil
		}
	}
	with := image.DeepCopy()
	with.Spec.Keys = nil
	for _, k := range keys {
		if own != nil && !slices.ContainsFunc(own, func(o signature.Key) bool {
			return o.Fingerprint == k.Fingerprint
		}) {
			continue
		}
		text, err := k.PEM()
		if err != nil {
			return nil, nil, err
		}
		with.Spec.Keys = append(with.Spec.Keys, text)
	}
	if len(with.Spec.Keys) == 0 {
		return nil, is(v1alpha1.ReasonNotSigned, "none of the keys of the VMImage is one that "+
			"the policy of the namespace asks for: name one of those, or none").
			after(time.Minute), nil
	}
	return with, nil, nil
}
