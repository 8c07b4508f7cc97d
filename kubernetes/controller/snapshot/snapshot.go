package snapshot

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/source"
)

// Reconciler makes golden objects for identities.
type Reconciler struct{ objects.Kit }

const (
	// failedStays is how long a failed Job stays before the next try, so that people can inspect
	// it.
	failedStays = time.Minute
	// maxOwners is the largest number of owners of a Job. An object has room for some thousands.
	maxOwners = 100
)

// Reconcile makes the golden objects for one identity, and reports the progress in condition
// Populated.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var before v1alpha1.VMIdentity
	if err := r.Client.Get(ctx, req.NamespacedName, &before); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if before.DeletionTimestamp != nil {
		return ctrl.Result{}, nil // objects are collected
	}
	class, name, err := r.golden(ctx, &before)
	if err != nil {
		return ctrl.Result{}, err
	}
	if name == "" {
		c := apimeta.FindStatusCondition(before.Status.Conditions, v1alpha1.ConditionPopulated)
		if c == nil || c.Status == metav1.ConditionTrue {
			return ctrl.Result{}, nil
		}
		// The missing object is not made any more.
		id := before.DeepCopy()
		apimeta.RemoveStatusCondition(&id.Status.Conditions, v1alpha1.ConditionPopulated)
		return ctrl.Result{}, r.Report(ctx, &before, id)
	}
	w := &work{Reconciler: r, id: &before, class: class, name: name}
	c, requeueAfter, err := w.step(ctx)
	if c == nil {
		return ctrl.Result{}, err
	}
	c.Type = v1alpha1.ConditionPopulated
	id := before.DeepCopy()
	objects.SetCondition(&id.Status.Conditions, id.Generation, *c)
	return ctrl.Result{RequeueAfter: requeueAfter}, cmp.Or(r.Report(ctx, &before, id), err)
}

// golden returns the storage class of an identity, and the name of its golden objects. The name is
// "" if the identity needs none: its claim has or had a volume, perhaps from a backup, or its usage
// type is unknown, which package identity reports. A claim without a volume needs them, because the
// driver may read the snapshot only after a pod was scheduled. An existing claim keeps its class
// and the name of its source when another class becomes the default.
func (r *Reconciler) golden(ctx context.Context, id *v1alpha1.VMIdentity) (class *string,
	name string, err error) {
	if !source.OfImage(&id.Spec.DiskSpec) {
		return nil, "", nil
	}
	claim, err := objects.Claim(ctx, r.Client, id)
	if err != nil || claim == nil && id.Status.CreationTime != nil || claim != nil &&
		(claim.Status.Phase == corev1.ClaimBound || claim.Status.Phase == corev1.ClaimLost) {
		return nil, "", err
	}
	class, wrong, err := r.ClassOf(ctx, &id.Spec.DiskSpec)
	if wrong != "" || err != nil {
		return nil, "", err
	}
	name = source.Golden(id.Spec.Image, class)
	if claim == nil || claim.Spec.DataSourceRef == nil {
		return class, name, nil
	}
	own := claim.Spec.StorageClassName
	for _, c := range []*string{own, nil} { // nil: an earlier version did not resolve it
		if is := source.Golden(id.Spec.Image, c); is == claim.Spec.DataSourceRef.Name {
			return own, is, nil
		}
	}
	return class, name, nil
}

// work is the work on one identity.
type work struct {
	*Reconciler
	id    *v1alpha1.VMIdentity
	class *string
	name  string
}

func populating(format string, args ...any) *metav1.Condition {
	return &metav1.Condition{Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonPopulating,
		Message: fmt.Sprintf(format, args...)}
}

func wrong(format string, args ...any) *metav1.Condition {
	c := populating(format, args...)
	c.Reason = v1alpha1.ReasonPopulationError
	return c
}

// step makes the next missing object. It returns the condition, and the time of the next check if
// no event announces the next step. Without a condition, the state is unknown.
func (w *work) step(ctx context.Context) (c *metav1.Condition, requeueAfter time.Duration,
	err error) {
	if reason, message, err := w.ImageRefused(ctx, w.id); err != nil {
		return nil, 0, err
	} else if reason != "" {
		c := populating("%s", message)
		c.Reason = reason
		return c, time.Minute, nil
	}
	job, c, err := w.job(ctx)
	switch {
	case err != nil:
		return c, 0, err
	case c != nil:
		return c, time.Minute, nil // no event announces the end of a Job of another owner
	}
	claim, snapshot := &corev1.PersistentVolumeClaim{}, source.NewSnapshot()
	for _, one := range []struct {
		client.Object
		kind string
		from client.Reader
	}{{claim, "claim", w.Client}, {snapshot, source.SnapshotKind.Kind, w.Snapshots}} {
		there, err := w.get(ctx, one.from, one.Object)
		if err != nil {
			return nil, 0, err
		}
		if there && metav1.GetControllerOf(one.Object) == nil && // as after a backup was restored
			one.GetDeletionTimestamp() == nil {
			return wrong("there is a %s %s that no Job was made for: delete it", one.kind, w.name),
				time.Minute, nil
		}
		ours := there && metav1.IsControlledBy(one.Object, job)
		if ours && one.Object == claim && claim.DeletionTimestamp != nil &&
			objects.Ended(job).Type == "" {
			// The claim that the Job fills was deleted. The end of the Job may be known after the
			// deletion, and then the next claim, which is empty, could be taken for the filled one.
			err = objects.DeleteJob(ctx, w.Client, job, metav1.DeletePropagationBackground)
		}
		if there && (one.GetDeletionTimestamp() != nil || !ours) {
			return populating("the %s %s of an earlier try is being deleted: then it is made again",
				one.kind, w.name), time.Minute, err
		}
	}
	switch {
	case objects.Ended(job).Type == batchv1.JobFailed:
		return w.retry(ctx, job, objects.Ended(job))
	case objects.Ended(job).Type != batchv1.JobComplete && claim.ResourceVersion == "":
		if wrote, err := w.wrote(ctx, job); err != nil {
			return nil, 0, err
		} else if wrote {
			c, err := w.emptied(ctx, job)
			return c, 0, err
		}
		size := w.SizeOfClaim(&w.id.Spec.DiskSpec)
		if size.Cmp(w.Options.ClaimSize) < 0 {
			size = w.Options.ClaimSize
		}
		c, err := w.create(ctx, newClaim(w.id, job, w.class, size))
		return c, 0, err
	case objects.Ended(job).Type != batchv1.JobComplete:
		return w.filling(job), 0, nil
	case snapshot.GetResourceVersion() == "" && claim.ResourceVersion == "":
		c, err := w.emptied(ctx, job)
		return c, 0, err
	case snapshot.GetResourceVersion() == "":
		c, err := w.create(ctx, newSnapshot(w.id, job, w.Options.SnapshotClass))
		return c, 0, err
	}
	ready, _, problem := source.SnapshotState(snapshot)
	switch {
	case ready:
		return &metav1.Condition{Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonPopulated,
			Message: fmt.Sprintf("VolumeSnapshot %s has the image", w.name)}, 0, nil
	case problem != "":
		return wrong("the snapshot %s of the image fails: %s", w.name, problem), 0, nil
	}
	return populating("the snapshot %s of the image is being taken", w.name), 0, nil
}

func (w *work) get(ctx context.Context, from client.Reader, o client.Object) (there bool,
	err error) {
	err = from.Get(ctx, client.ObjectKey{Namespace: w.id.Namespace, Name: w.name}, o)
	return err == nil, client.IgnoreNotFound(err)
}

// create makes an object. It is no error if another identity was faster.
func (w *work) create(ctx context.Context, o client.Object) (*metav1.Condition, error) {
	kind := cmp.Or(o.GetObjectKind().GroupVersionKind().Kind, objects.KindOf(o))
	err := w.Client.Create(ctx, o, client.FieldOwner(v1alpha1.FieldManager))
	switch {
	case err == nil:
		return populating("%s %s is made", kind, w.name), nil
	case apierrors.IsAlreadyExists(err):
		return nil, fmt.Errorf("%s %s is not in the cache yet: %w", kind, w.name, err)
	}
	what := kind + " " + w.name
	if _, message := objects.Refused(err, what); message != "" {
		return wrong("%s", message), err
	}
	return nil, fmt.Errorf("%s: %w", what, err)
}

// wrote reports whether a pod of a Job without a claim has written the image. The end of the Job
// may be known a moment after the deletion of its claim.
func (w *work) wrote(ctx context.Context, job *batchv1.Job) (bool, error) {
	var pods corev1.PodList
	if err := w.Live.List(ctx, &pods, client.InNamespace(job.Namespace),
		client.MatchingLabels{labelGolden: w.name}); err != nil {
		return false, fmt.Errorf("pods of Job %s: %w", w.name, err)
	}
	return slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool {
		return p.Status.Phase == corev1.PodSucceeded && metav1.IsControlledBy(&p, job)
	}), nil
}

// emptied begins again if the claim with the image was deleted before there was a snapshot: the Job
// does not fill another claim.
func (w *work) emptied(ctx context.Context, job *batchv1.Job) (*metav1.Condition, error) {
	there, err := w.get(ctx, w.Live, &corev1.PersistentVolumeClaim{})
	if there || err != nil {
		return populating("the claim %s has the image", w.name), err // the cache is late
	}
	return populating("the claim %s with the image was deleted: the image is written again",
		w.name), objects.DeleteJob(ctx, w.Client, job, metav1.DeletePropagationBackground)
}

// job returns the Job if this identity owns it, or if it has enough other owners. Else the
// condition tells why not yet. Kubernetes removes deleted identities from the owners, so there is
// room for others. If all of them go, the Job goes, and an identity that still needs it makes it
// again.
func (w *work) job(ctx context.Context) (*batchv1.Job, *metav1.Condition, error) {
	job := &batchv1.Job{}
	there, err := w.get(ctx, w.Client, job)
	switch {
	case err != nil:
		return nil, nil, err
	case !there:
		c, err := w.create(ctx, newJob(w.id, w.name, w.Options))
		return nil, c, err
	case job.DeletionTimestamp != nil:
		return nil, populating("Job %s is being deleted: then it is made again", w.name), nil
	case slices.ContainsFunc(job.OwnerReferences, func(o metav1.OwnerReference) bool {
		return o.UID == w.id.UID
	}):
		return job, nil, nil
	case job.Labels[labelGolden] != w.name:
		return nil, wrong("there is a Job %s that was not made for an image: delete it", w.name),
			nil
	case len(job.OwnerReferences) >= maxOwners:
		return job, nil, nil
	}
	owned := job.DeepCopy()
	owned.OwnerReferences = append(owned.OwnerReferences, ownedBy(w.id))
	if err := w.Client.Patch(ctx, owned, objects.Lock(job),
		client.FieldOwner(v1alpha1.FieldManager)); err != nil {
		return nil, nil, fmt.Errorf("patch of Job %s: %w", w.name, err)
	}
	if owned.DeletionTimestamp != nil {
		return nil, populating("Job %s is being deleted: then it is made again", w.name), nil
	}
	return owned, nil, nil
}

// filling is the condition for a running Job.
func (w *work) filling(job *batchv1.Job) *metav1.Condition {
	if job.Status.Failed > 0 {
		return populating("Job %s tries again to write the image (%d tries failed): `kubectl logs "+
			"job/%[1]s` says why", w.name, job.Status.Failed)
	}
	return populating("Job %s writes the image; if that lasts, `kubectl describe pod -l %s=%[1]s` "+
		"says why, or `kubectl describe job %[1]s` if there is none", w.name, labelGolden)
}

// retry deletes a failed Job after a while.
func (w *work) retry(ctx context.Context, job *batchv1.Job, failed batchv1.JobCondition) (
	*metav1.Condition, time.Duration, error) {
	left := objects.Left(failed, failedStays)
	if left <= 0 {
		// Its claim and its snapshot are deleted with it.
		if err := objects.DeleteJob(ctx, w.Client, job,
			metav1.DeletePropagationBackground); err != nil {
			return nil, 0, err
		}
		return populating("Job %s failed, and is made again", w.name), 0, nil
	}
	// Find the message only once, because reading pods takes a request.
	now := apimeta.FindStatusCondition(w.id.Status.Conditions, v1alpha1.ConditionPopulated)
	if now != nil && now.Reason == v1alpha1.ReasonPopulationError &&
		strings.Contains(now.Message, string(job.UID)) {
		return now.DeepCopy(), left, nil
	}
	said, err := objects.LastWords(ctx, w.Live, job, labelGolden)
	if err != nil {
		return nil, 0, err
	}
	return wrong("Job %s (%s) cannot write the image: %s; it is tried again after %v, or at once "+
			"when the Job is deleted", w.name, job.UID, cmp.Or(said, failed.Message), failedStays),
		left, nil
}
