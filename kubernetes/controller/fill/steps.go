package fill

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// create makes the claim or the Job that fills a claim.
func (r *Reconciler) create(ctx context.Context, o client.Object) (*state, error) {
	err := r.Client.Create(ctx, o, client.FieldOwner(v1alpha1.FieldManager))
	if client.IgnoreAlreadyExists(err) == nil { // the cache may be late
		return is(v1alpha1.ReasonFilling, "%s is made", o.GetName()).after(pollInterval), nil
	}
	what := o.GetName() + ", with which the claim is filled"
	if reason, message := objects.Refused(err, what); reason != "" {
		if reason != v1alpha1.ReasonQuotaExceeded {
			reason = v1alpha1.ReasonFillFailed
		}
		return is(reason, "%s", message).after(time.Minute), nil
	}
	return nil, fmt.Errorf("making %s: %w", o.GetName(), err)
}

// give gives the filled volume to the claim that waits for it.
func (r *Reconciler) give(ctx context.Context, claim, filled *corev1.PersistentVolumeClaim) (
	*state, error) {
	binding := is(v1alpha1.ReasonFilling, "the volume is filled, and given to the claim").
		after(time.Second)
	binding.progress = "100%"
	now, err := r.liveClaim(ctx, claim)
	if now == nil || now.Spec.VolumeName != "" || err != nil {
		return binding, err // the cache is late
	}
	from, err := r.liveClaim(ctx, filled)
	if from == nil || err != nil {
		return binding, err
	}
	volume, err := objects.Volume(ctx, r.Live, from.Spec.VolumeName, "")
	switch {
	case err != nil:
		return nil, err
	case objects.BoundTo(volume, claim.UID):
		return binding, nil
	case from.Spec.VolumeName == "" || !objects.BoundTo(volume, from.UID):
		return is(v1alpha1.ReasonFillFailed, "the Job has ended, and no volume is bound to the "+
			"claim %s that it has filled: delete the Job %[1]s", filled.Name).
			after(pollInterval), nil
	}
	return binding, objects.Change(ctx, r.Client, volume, func(v *corev1.PersistentVolume) {
		v.Spec.ClaimRef = &corev1.ObjectReference{APIVersion: "v1", Kind: "PersistentVolumeClaim",
			Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID}
	})
}

// liveClaim reads a claim from the API server. It returns nil if another one has the name now.
func (r *Reconciler) liveClaim(ctx context.Context, claim *corev1.PersistentVolumeClaim) (
	*corev1.PersistentVolumeClaim, error) {
	now, err := objects.Find[corev1.PersistentVolumeClaim](ctx, r.Live, "claim",
		client.ObjectKeyFromObject(claim))
	if now == nil || now.UID != claim.UID || now.DeletionTimestamp != nil {
		return nil, err
	}
	return now, err
}

// clean deletes the objects that have filled a claim, when the claim has its volume.
func (r *Reconciler) clean(ctx context.Context, image string, claim *corev1.PersistentVolumeClaim,
	m made) (*state, error) {
	if claim.Status.Phase != corev1.ClaimBound || m.claim == nil && m.job == nil {
		return nil, nil
	}
	s := is(v1alpha1.ReasonFilled, "the claim has the disk of VMImage %s", image)
	if m.job != nil {
		digest, err := objects.LastWords(ctx, r.Live, m.job, labelFill)
		if err != nil {
			return nil, err
		}
		if digest != "" && objects.Ended(m.job).Type == batchv1.JobComplete {
			s.message += ", " + digest
		}
		if err := r.deleteJob(ctx, m.job); err != nil {
			return nil, err
		}
	}
	if m.claim != nil && m.claim.DeletionTimestamp == nil {
		err := r.Client.Delete(ctx, m.claim, client.Preconditions{UID: &m.claim.UID})
		if client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("claim %s: %w", m.claim.Name, err)
		}
	}
	if m.job == nil {
		return nil, nil // an event has announced it
	}
	return s, nil
}

// deleteJob deletes a Job after its pods, so that no two write to one volume.
func (r *Reconciler) deleteJob(ctx context.Context, job *batchv1.Job) error {
	return objects.DeleteJob(ctx, r.Client, job, metav1.DeletePropagationForeground)
}

// failed reports why a Job has failed. The Job is made again after a while.
func (r *Reconciler) failed(ctx context.Context, job *batchv1.Job, end batchv1.JobCondition) (
	*state, error) {
	said, err := objects.LastWords(ctx, r.Live, job, labelFill)
	if err != nil {
		return nil, err
	}
	s := is(v1alpha1.ReasonFillFailed, "the claim cannot be filled: %s. It is tried again every "+
		"%s, and at once when the VMImage changes", cmp.Or(said, end.Message), afterFailed)
	if left := objects.Left(end, afterFailed); left > 0 {
		return s.after(left), nil
	}
	return s.after(pollInterval), r.deleteJob(ctx, job)
}

// running reports what a Job does.
func (r *Reconciler) running(ctx context.Context, job *batchv1.Job) (*state, error) {
	s := is(v1alpha1.ReasonFilling, "Job %s has no pod that runs: if that lasts, `kubectl "+
		"describe job %[1]s` says why", job.Name).after(pollInterval)
	var pods corev1.PodList
	if err := r.Live.List(ctx, &pods, client.InNamespace(job.Namespace),
		client.MatchingLabels{labelFill: job.Name}); err != nil {
		return nil, fmt.Errorf("pods: %w", err)
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if objects.Finished(pod) || !metav1.IsControlledBy(pod, job) {
			continue
		}
		if why := objects.Unschedulable(pod); why != nil {
			return is(v1alpha1.ReasonUnschedulable, "no node can run the pod that fills the "+
				"claim: %s", why.Message).after(pollInterval), nil
		}
		if why := waitsFor(pod); why != "" {
			s.message = "the pod that fetches the disk does not start: " + why
		}
		if pod.Status.Phase == corev1.PodRunning && pod.Status.PodIP != "" {
			s.pod, s.message = pod, "pod "+pod.Name+" fetches the disk"
		}
	}
	return s, nil
}

// waitsFor is the reason why the container of a pod does not start, such as a missing secret, or
// "".
func waitsFor(pod *corev1.Pod) string {
	for _, c := range pod.Status.ContainerStatuses {
		if w := c.State.Waiting; w != nil && w.Message != "" {
			return w.Reason + ": " + w.Message
		}
	}
	return ""
}

// progress asks all pods that fetch disks for their progress, at once. It ignores a pod that does
// not answer in time.
func (r *Reconciler) progress(ctx context.Context, all []*state) {
	ctx, stop := context.WithTimeout(ctx, askTime)
	defer stop()
	var group errgroup.Group
	group.SetLimit(16)
	for _, s := range all {
		if s.pod == nil {
			continue
		}
		group.Go(func() error {
			p, err := r.Ask(ctx, net.JoinHostPort(s.pod.Status.PodIP, strconv.Itoa(port)))
			if err == nil && p.Total > 0 && p.Done >= 0 {
				s.progress = fmt.Sprintf("%d%%",
					int64(min(1, float64(p.Done)/float64(p.Total))*100))
				s.message += ", " + s.progress + " so far"
			}
			return nil
		})
	}
	_ = group.Wait() // none returns an error
}

// quarter is the number of completed quarters of a progress such as 42%.
func quarter(progress string) string {
	percent, err := strconv.Atoi(strings.TrimSuffix(progress, "%"))
	if err != nil {
		return ""
	}
	return strconv.Itoa(percent / 25)
}
