package export

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/vmdisk"
)

// Reconciler exports disks.
type Reconciler struct{ objects.Kit }

// policy is the name of the admission policy that compares an export with its VMIdentity.
const policy = "exports.controller." + v1alpha1.Group

// pollInterval is the time between two checks of state that no event announces.
const pollInterval = 10 * time.Second

// Reconcile does the next step of the export of one identity.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	before, err := objects.Find[v1alpha1.VMIdentity](ctx, r.Client, "VMIdentity",
		req.NamespacedName)
	if before == nil || err != nil {
		return ctrl.Result{}, err
	}
	if before.Spec.Export == nil && before.Status.Export == nil &&
		apimeta.FindStatusCondition(before.Status.Conditions, v1alpha1.ConditionExported) == nil {
		return ctrl.Result{}, nil
	}
	id := before.DeepCopy()
	c, requeueAfter, err := r.step(ctx, id)
	if err != nil {
		return ctrl.Result{}, err
	}
	if c == nil {
		apimeta.RemoveStatusCondition(&id.Status.Conditions, v1alpha1.ConditionExported)
	} else {
		c.Type = v1alpha1.ConditionExported
		objects.SetCondition(&id.Status.Conditions, id.Generation, *c)
	}
	return ctrl.Result{RequeueAfter: requeueAfter}, r.Report(ctx, before, id)
}

// not is a condition with the reason why the disk is not exported.
func not(reason, format string, args ...any) *metav1.Condition {
	return &metav1.Condition{Status: metav1.ConditionFalse, Reason: reason,
		Message: fmt.Sprintf(format, args...)}
}

// step does the next step, and returns the condition (nil: none), and the time of the next check.
func (r *Reconciler) step(ctx context.Context, id *v1alpha1.VMIdentity) (*metav1.Condition,
	time.Duration, error) {
	if r.Options.Off(objects.Exports) {
		id.Status.Export = nil // no pod has to wait for it
		if id.Spec.Export == nil {
			return nil, 0, nil
		}
		return not(v1alpha1.ReasonInvalid, "exports are turned off (--without=exports)"), 0, nil
	}
	wanted := ""
	if id.Spec.Export != nil && id.DeletionTimestamp == nil {
		wanted = jobName(id)
	}
	if e := id.Status.Export; e != nil && e.JobName != wanted {
		return r.end(ctx, id, e.JobName)
	}
	switch {
	case wanted == "":
		return nil, 0, nil
	case id.Status.Export == nil:
		return r.begin(ctx, id)
	case !id.Status.Export.Running && id.Status.Export.CompletionTime != nil &&
		id.Status.Export.Digest != "":
		return exported(id.Status.Export), 0, nil
	}
	job, err := r.job(ctx, id, wanted)
	switch {
	case err != nil:
		return nil, 0, err
	case job == nil && !id.Status.Export.Running:
		// It failed, and its Job was deleted.
		id.Status.Export = nil
		return not(v1alpha1.ReasonExporting, "the export begins again"), 0, nil
	case job == nil:
		return r.createJob(ctx, id)
	case !metav1.IsControlledBy(job, id):
		id.Status.Export.Running = false
		return not(v1alpha1.ReasonInvalid, "there is a Job %s that is not of this VMIdentity: "+
			"delete it", job.Name), pollInterval, nil
	case job.DeletionTimestamp != nil:
		return not(v1alpha1.ReasonExporting, "Job %s is being deleted: the export begins again",
			job.Name), pollInterval, nil
	}
	return r.running(ctx, id, job)
}

// begin gives the disk to the export, if it is free. The write of the status fails if a pod has got
// the disk meanwhile.
func (r *Reconciler) begin(ctx context.Context, id *v1alpha1.VMIdentity) (*metav1.Condition,
	time.Duration, error) {
	if id.Spec.Attachment == v1alpha1.Service {
		return not(v1alpha1.ReasonInvalid, "the server of a disk with attachment Service has the "+
			"disk always: take a VMIdentitySnapshot, and export a VMIdentity that begins from "+
			"it"), 0, nil
	}
	if id.Status.Move != nil {
		return not(v1alpha1.ReasonInUse, "the disk is being moved to another node"),
			pollInterval, nil
	}
	if !apimeta.IsStatusConditionTrue(id.Status.Conditions, v1alpha1.ConditionBound) {
		return not(v1alpha1.ReasonClaimPending, "the disk has no volume yet, and so nothing to "+
			"export"), pollInterval, nil
	}
	if reason, message, err := r.ImageRefused(ctx, id); err != nil {
		return nil, 0, err
	} else if reason != "" {
		return not(reason, "the layers of the disk's image are not read: %s", message),
			pollInterval, nil
	}
	pods, err := objects.PodsWith(ctx, r.Live, id)
	if err != nil {
		return nil, 0, err
	}
	user := objects.User(pods, id)
	if id.Status.UsedBy != nil {
		user = id.Status.UsedBy.Name
	}
	if user != "" {
		return not(v1alpha1.ReasonInUse, "pod %s uses the disk: it is exported when that pod has "+
			"ended. To export it now, take a VMIdentitySnapshot, and export a VMIdentity that "+
			"begins from it", user), pollInterval, nil
	}
	// Check this first: otherwise a machine could wait for a Job that is never allowed.
	if c, err := r.refused(ctx, id, client.DryRunAll); c != nil ||
		client.IgnoreAlreadyExists(err) != nil {
		return c, time.Minute, err
	}
	now := metav1.Now()
	id.Status.Export = &v1alpha1.ExportStatus{Reference: id.Spec.Export.Reference,
		JobName: jobName(id), Running: true, StartTime: &now}
	return not(v1alpha1.ReasonExporting, "Job %s is made", jobName(id)), 0, nil
}

// createJob makes the Job. The disk belongs to it already.
func (r *Reconciler) createJob(ctx context.Context, id *v1alpha1.VMIdentity) (*metav1.Condition,
	time.Duration, error) {
	if c, err := r.refused(ctx, id); c != nil || err != nil {
		id.Status.Export = nil
		return c, time.Minute, err // even if the cache is late
	}
	return not(v1alpha1.ReasonExporting, "Job %s is made", jobName(id)), 0, nil
}

// refused makes the Job, or tries it in a dry run, and returns why the API server does not allow
// it.
func (r *Reconciler) refused(ctx context.Context, id *v1alpha1.VMIdentity,
	options ...client.CreateOption) (*metav1.Condition, error) {
	job := newJob(id, r.Options.Server)
	err := r.Client.Create(ctx, job, append(options, client.FieldOwner(v1alpha1.FieldManager))...)
	// If the policy refuses it, the API server does not know spec.export yet.
	passes := apierrors.IsForbidden(err) && strings.Contains(err.Error(), policy)
	if _, message := objects.Refused(err, "the Job "+job.Name); message != "" && !passes {
		return not(v1alpha1.ReasonExportFailed, "%s", message), nil
	}
	if err != nil {
		return nil, fmt.Errorf("making Job %s: %w", job.Name, err)
	}
	return nil, nil
}

var digest = regexp.MustCompile(`^sha256:[a-f0-9]{64}$`)

// running reports the progress of a Job.
func (r *Reconciler) running(ctx context.Context, id *v1alpha1.VMIdentity, job *batchv1.Job) (
	*metav1.Condition, time.Duration, error) {
	e, ended := id.Status.Export, objects.Ended(job)
	if ended.Type == "" {
		return not(v1alpha1.ReasonExporting, "Job %s commits the disk to %s; if that lasts, "+
			"`kubectl describe pod -l %s=%s` says why", job.Name, e.Reference,
			v1alpha1.LabelExport, job.Name), 0, nil
	}
	if !e.Running {
		return apimeta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionExported), 0, nil
	}
	said, err := objects.LastWords(ctx, r.Live, job, v1alpha1.LabelExport)
	if err != nil {
		return nil, 0, err
	}
	e.Running, e.CompletionTime = false, new(metav1.Now())
	if ended.Type == batchv1.JobComplete && digest.MatchString(said) {
		e.Digest = said
		return exported(e), 0, nil
	}
	if ended.Type == batchv1.JobComplete {
		said = "its pod does not say the digest of the image that it has pushed"
	}
	return not(v1alpha1.ReasonExportFailed, "Job %s cannot commit the disk to %s: %s. Delete the "+
		"Job to try again, or change spec.export", job.Name, e.Reference,
		cmp.Or(said, ended.Message)), 0, nil
}

func exported(e *v1alpha1.ExportStatus) *metav1.Condition {
	return &metav1.Condition{Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonExported,
		Message: fmt.Sprintf("the disk is in %s, by the digest %s", e.Reference, e.Digest)}
}

// end ends an export that is not requested any more. The disk is free when its Job is gone, after
// its pods: a Job that is not in the cache yet could still make some.
func (r *Reconciler) end(ctx context.Context, id *v1alpha1.VMIdentity, name string) (
	*metav1.Condition, time.Duration, error) {
	job, err := objects.Find[batchv1.Job](ctx, r.Live, "Job", client.ObjectKey{
		Namespace: id.Namespace, Name: name})
	if err != nil {
		return nil, 0, err
	}
	if job != nil && metav1.IsControlledBy(job, id) {
		if err := objects.DeleteJob(ctx, r.Client, job,
			metav1.DeletePropagationForeground); err != nil {
			return nil, 0, err
		}
		return not(v1alpha1.ReasonStopping, "Job %s of the earlier export is ending", name),
			time.Second, nil
	}
	var pods corev1.PodList
	if err := r.Live.List(ctx, &pods, client.InNamespace(id.Namespace),
		client.MatchingLabels{v1alpha1.LabelExport: name}); err != nil {
		return nil, 0, fmt.Errorf("pods of Job %s: %w", name, err)
	}
	for i := range pods.Items {
		if !objects.Finished(&pods.Items[i]) {
			return not(v1alpha1.ReasonStopping, "pod %s of the earlier export is ending",
				pods.Items[i].Name), pollInterval, nil
		}
	}
	id.Status.Export = nil
	if id.Spec.Export == nil {
		return nil, 0, nil
	}
	return not(v1alpha1.ReasonExporting, "the earlier export has ended"), 0, nil
}

// job reads a Job. The Job is in the cache because of its label.
func (r *Reconciler) job(ctx context.Context, id *v1alpha1.VMIdentity, name string) (*batchv1.Job,
	error) {
	return objects.Find[batchv1.Job](ctx, r.Client, "Job", client.ObjectKey{
		Namespace: id.Namespace, Name: name})
}

// Setup adds the controller to a manager.
func Setup(mgr ctrl.Manager, kit objects.Kit) error {
	r := &Reconciler{kit}
	b := r.For(mgr, "export", &v1alpha1.VMIdentity{})
	if !r.Options.Off(objects.Exports) {
		// The end of a pod lets the disk be exported.
		b = b.Owns(&batchv1.Job{}).Watches(&corev1.Pod{},
			handler.EnqueueRequestsFromMapFunc(objects.Identities))
	}
	return b.Complete(objects.Reconciler(r))
}

const (
	retries = 2
	// The kubelet copies the content of this file to the status of the pod.
	digestFile = corev1.TerminationMessagePathDefault
)

// jobName is the name of the Job for the export in the spec of an identity.
func jobName(id *v1alpha1.VMIdentity) string {
	e := id.Spec.Export
	text := fmt.Appendf(nil, "%s\n%s\n%s\n%s\n%v", id.Name, id.UID, e.Reference, e.SecretName,
		e.Flat)
	if e.RegistryCA != nil {
		text = fmt.Appendf(text, "\n%s\n%s", e.RegistryCA.Name, e.RegistryCA.Key)
	}
	sum := sha256.Sum256(text)
	return "vmexport-" + hex.EncodeToString(sum[:10])
}

// args are the arguments of the command. The layers of the disk's image come from its registry.
func args(id *v1alpha1.VMIdentity) []string {
	all := []string{"commit", id.Spec.Export.Reference, "--persistent-dir=" + vmdisk.VolumeDir,
		"--digest-file=" + digestFile}
	switch {
	case !id.Spec.Export.Flat && id.Spec.Image != "" && !id.Spec.FromAddress():
		return append(all, "--onto="+id.Spec.Image)
	case id.Spec.Image != "" && id.Spec.Population != v1alpha1.Snapshot:
		// Blocks that were not copied from the image yet come from there.
		all = append(all, "--image="+id.Spec.Image)
	}
	return append(all, "--flat", "--base=none")
}

// newJob is the Job that commits the disk of an identity.
func newJob(id *v1alpha1.VMIdentity, server string) *batchv1.Job {
	name := jobName(id)
	labels := map[string]string{v1alpha1.LabelIdentity: id.Name, v1alpha1.LabelExport: name}
	e := id.Spec.Export
	return objects.Command{Args: args(id), Image: server, Claim: v1alpha1.ClaimName(id.Name),
		Dir: vmdisk.VolumeDir, Secret: e.SecretName, CA: e.RegistryCA, Retries: retries}.Job(
		metav1.ObjectMeta{Namespace: id.Namespace, Name: name, Labels: labels,
			OwnerReferences: objects.Owned("VMIdentity", id)}, labels)
}
