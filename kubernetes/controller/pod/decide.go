package pod

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/admission"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/local"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/source"
)

// decision is the result of decide for an identity and the pods that ask for it.
type decision struct {
	before, id *v1alpha1.VMIdentity // as read, and as wanted
	pods       []objects.Asking     // pods that ask for the identity and have not ended
	waiting    []objects.Asking     // of these, the pods that are at their gate

	user   *corev1.Pod             // the pod that uses the disk, if the cache has it
	inUse  bool                    // the disk is in use
	freed  *corev1.ObjectReference // the pod that used the disk and has ended
	result ctrl.Result

	start []objects.Asking // pods whose gates are removed
	// With a fixed firmwareUUID: the set that names its pod, and the pod that it should name.
	set  *v1alpha1.VMIdentitySet
	next *corev1.ObjectReference
}

// decide makes a decision. It writes nothing.
func (r *Reconciler) decide(ctx context.Context, d *decision) error {
	if err := r.findUser(ctx, d); err != nil {
		return err
	}
	var first *waitingPod
	for _, p := range d.waiting {
		h, err := r.mustWait(ctx, d, p)
		if err != nil {
			return err
		}
		if h == nil {
			d.start = append(d.start, p)
			switch {
			case !d.inUse:
				d.user, d.inUse = p.Pod, true
				d.id.Status.UsedBy = reference(p)
			case d.id.Status.UsedBy.UID != p.UID:
				d.id.Status.MigratesTo = reference(p)
			}
			continue
		}
		r.tell(client.ObjectKeyFromObject(d.id), p, h)
		if first == nil {
			first = h
		}
	}
	d.say(first)
	return nil
}

// findUser finds the pod that uses the disk, and the pod that its machine migrates into. It frees
// the disk if no pod uses it any more.
func (r *Reconciler) findUser(ctx context.Context, d *decision) error {
	status := &d.id.Status
	user, err := r.running(ctx, d, status.UsedBy)
	if err != nil {
		return err
	}
	if user == nil && status.UsedBy != nil {
		d.freed = status.UsedBy
	}
	target, err := r.running(ctx, d, status.MigratesTo)
	if err != nil {
		return err
	}
	// The gate of such a pod was removed by hand. Right or wrong, the pod runs.
	for _, p := range d.pods {
		ref := reference(p)
		switch {
		case p.Gate >= 0:
		case target == nil && (user == nil || user.UID != p.UID):
			target = ref
		}
	}
	if user == nil {
		user, target = target, nil
	}
	status.UsedBy, status.MigratesTo, d.inUse = user, target, user != nil
	for _, p := range d.pods {
		if user != nil && p.UID == user.UID {
			d.user = p.Pod
		}
	}
	return nil
}

// running returns a reference to a pod if the pod has not ended.
func (r *Reconciler) running(ctx context.Context, d *decision, ref *corev1.ObjectReference) (
	*corev1.ObjectReference, error) {
	if ref == nil || slices.ContainsFunc(d.pods, func(p objects.Asking) bool {
		return p.UID == ref.UID
	}) {
		return ref, nil
	}
	live, err := r.alive(ctx, d.id.Namespace, ref)
	if !live || err != nil {
		return nil, err
	}
	// The cache is late, or the labels of the pod were removed. Then no event will announce its
	// end.
	d.result.RequeueAfter = pollInterval
	return ref, nil
}

// besides returns why a pod may not start while another one uses the disk, or "". Only KubeVirt's
// target pod for moving a running machine may, and one at a time: it writes only after the other
// pod has stopped.
func (d *decision) besides(p objects.Asking) string {
	user, target := d.id.Status.UsedBy, d.id.Status.MigratesTo
	switch {
	case !d.inUse || user.UID == p.UID || target != nil && target.UID == p.UID:
		return ""
	case target != nil:
		return fmt.Sprintf("pod %s uses the disk, and its machine migrates into pod %s", user.Name,
			target.Name)
	case d.id.Spec.Attachment == v1alpha1.Service && d.user != nil &&
		admission.Migrates(p.Pod, d.user):
		return ""
	}
	return fmt.Sprintf("pod %s uses the disk", user.Name)
}

// alive reports whether a pod exists and has not ended, according to the API server.
func (r *Reconciler) alive(ctx context.Context, namespace string, ref *corev1.ObjectReference) (
	bool, error) {
	p, err := objects.Find[corev1.Pod](ctx, r.Live, "pod",
		client.ObjectKey{Namespace: namespace, Name: ref.Name})
	return p != nil && p.UID == ref.UID && !objects.Finished(p), err
}

// mustWait returns why a pod must wait, or nil.
func (r *Reconciler) mustWait(ctx context.Context, d *decision, p objects.Asking) (
	*waitingPod, error) {
	because := func(reason, format string, args ...any) (*waitingPod, error) {
		return &waitingPod{p.UID, reason, fmt.Sprintf("pod %s waits: ", p.Name) +
			fmt.Sprintf(format, args...)}, nil
	}
	id := d.id
	if !id.DeletionTimestamp.IsZero() {
		return because(v1alpha1.ReasonDeleting, "VMIdentity %s is being deleted: the pod gets a "+
			"new disk after that", id.Name)
	}
	nameIt := v1alpha1.Numbered(v1alpha1.AnnotationName, p.Number)
	if id.Spec.SetName != "" && id.Spec.SetName != p.SetName {
		return because(v1alpha1.ReasonInvalid, "VMIdentity %s was made from VMIdentitySet %s, and "+
			"the pod asks for %s: give the pod the annotation %s with another name", id.Name,
			id.Spec.SetName, p.SetName, nameIt)
	}
	set, err := r.set(ctx, r.Client, p)
	if err != nil {
		return nil, err
	}
	if set == nil {
		return setMissing(p), nil
	}
	wanted := set.Spec.Image
	if id.Spec.FollowedTag != "" { // its pods have no image as a volume
		wanted = id.Spec.Image
	}
	for _, image := range []string{wanted, cmp.Or(imageOf(p), id.Spec.Image)} {
		if image != id.Spec.Image {
			return because(v1alpha1.ReasonImageDiffers, "the disk of VMIdentity %s was made from "+
				"%s, and the pod would start it with %s: use the former image, or give the pod "+
				"the annotation %s with another name", id.Name, cmp.Or(id.Spec.Image, "none"),
				cmp.Or(image, "none"), nameIt)
		}
	}
	if message, err := r.differs(ctx, id, set, p); err != nil {
		return nil, err
	} else if message != "" {
		return because(v1alpha1.ReasonSetDiffers, "%s", message)
	}
	if !id.Status.Ready || id.Status.Move != nil {
		c := meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionReady)
		if c == nil {
			return because(v1alpha1.ReasonClaimPending, "its disk is being made")
		}
		return because(c.Reason, "%s", c.Message)
	}
	// Ready may be older than the change of the attachment.
	if id.Spec.Attachment == v1alpha1.Service &&
		!meta.IsStatusConditionTrue(id.Status.Conditions, v1alpha1.ConditionServed) {
		return because(v1alpha1.ReasonStarting, "its disk is not served yet")
	}
	// Check it now, because a policy may have changed since Ready was written.
	if reason, message, err := r.ImageRefused(ctx, id); err != nil {
		return nil, err
	} else if reason != "" {
		d.result.RequeueAfter = pollInterval
		return because(reason, "%s", message)
	}
	if id.Spec.Source != nil {
		if a, err := r.begins(ctx, id, p); err != nil {
			return nil, err
		} else if a.Reason != "" {
			d.result.RequeueAfter = pollInterval
			return because(a.Reason, "%s", a.Message)
		}
	}
	if e := id.Status.Export; e != nil && e.Running {
		return because(v1alpha1.ReasonExporting, "Job %s commits the disk to %s: it starts after "+
			"that, or when spec.export of VMIdentity %s is removed", e.JobName, e.Reference,
			id.Name)
	}
	if message := d.besides(p); message != "" {
		return because(v1alpha1.ReasonInUse, "%s", message)
	}
	if id.Spec.Attachment != v1alpha1.Service &&
		slices.Contains(id.Finalizers, v1alpha1.FinalizerService) {
		return because(v1alpha1.ReasonStopping, "the server that VMIdentity %s had with "+
			"attachment Service still has the disk: the message of its condition Served says why",
			id.Name)
	}
	if r.Options.MoveImage != "" {
		message, err := local.MustWait(ctx, r.Live, id, p)
		if err != nil {
			return nil, err
		}
		if message != "" {
			return because(v1alpha1.ReasonCopying, "%s", message)
		}
	}
	// KubeVirt gives its machines their UUIDs itself.
	if fixed(id) && admission.Machine(p.Pod) == "" {
		return r.waitForUUID(ctx, d, set, p)
	}
	// All pods take their disks in one order, so that no two pods wait for each other's disk.
	for _, other := range objects.ByIdentity(p.Pod) {
		if other < id.Name && objects.Gated(p.Pod, other) {
			return because(v1alpha1.ReasonStarting, "its disk of VMIdentity %s comes first: "+
				"`kubectl describe vmid %s` says what that waits for", other, other)
		}
	}
	return nil, nil
}

// begins returns why a disk cannot begin from its source now: a clone of a disk that a pod writes
// is useless.
func (r *Reconciler) begins(ctx context.Context, id *v1alpha1.VMIdentity, p objects.Asking) (
	source.Answer, error) {
	claim, err := objects.Claim(ctx, r.Live, id)
	if claim == nil || err != nil {
		return source.Answer{}, err
	}
	return source.Finder{Kit: r.Kit}.Used(ctx, id, claim, p.UID)
}

// hostOf is the host that serves a disk with attachment Service.
func hostOf(id *v1alpha1.VMIdentity) string {
	host, _, _ := net.SplitHostPort(id.Status.Portal) // the controller has written it
	return host
}

// differs returns why a pod cannot use a disk that differs from its set, or "". The set may have
// been made again after the disk, or after admission has looked at the pod. Only the properties for
// which the pod was made have to agree: the place and the size of a disk are in its identity.
func (r *Reconciler) differs(ctx context.Context, id *v1alpha1.VMIdentity,
	set *v1alpha1.VMIdentitySet, p objects.Asking) (string, error) {
	if message := unfit(id, set, p); message != "" {
		return message, nil
	}
	if id.Spec.Population == v1alpha1.Snapshot || diskOf(p) == nil || imageOf(p) != "" {
		return "", nil
	}
	// Admission trusted status.hydratedClaim. Now check the claim.
	claim, err := objects.Claim(ctx, r.Live, id)
	if err != nil || claim != nil && id.NeedsNoImage(claim.UID) {
		return "", err
	}
	return fmt.Sprintf("it was made without the image of VMIdentity %s, whose disk needs it"+
		madeAgain, id.Name), nil
}

// madeAgain is the advice for a pod that was made for another disk.
const madeAgain = ": delete the pod, and make it again from its own manifest"

// unfit is differs without reading the claim.
func unfit(id *v1alpha1.VMIdentity, set *v1alpha1.VMIdentitySet, p objects.Asking) string {
	disk := diskOf(p)
	service := id.Spec.Attachment == v1alpha1.Service
	filled := id.Spec.Population == v1alpha1.Snapshot
	switch {
	case service != (set.Spec.Attachment == v1alpha1.Service):
		return fmt.Sprintf("VMIdentity %s has attachment %s, and VMIdentitySet %s has %s: make "+
			"that set again with the attachment of the disk, or change that of the VMIdentity",
			id.Name, cmp.Or(id.Spec.Attachment, v1alpha1.Sidecar), set.Name,
			cmp.Or(set.Spec.Attachment, v1alpha1.Sidecar))
	case filled != (set.Spec.Population == v1alpha1.Snapshot):
		return fmt.Sprintf("the disk of VMIdentity %s was made with population %s, and "+
			"VMIdentitySet %s has %s: make that set again with the population of the disk, or "+
			"give the pod the annotation %s with another name", id.Name,
			cmp.Or(id.Spec.Population, v1alpha1.Overlay), set.Name,
			cmp.Or(set.Spec.Population, v1alpha1.Overlay),
			v1alpha1.Numbered(v1alpha1.AnnotationName, p.Number))
	case service != (disk == nil):
		return fmt.Sprintf("it was made for another attachment than %s, which VMIdentity %s has"+
			madeAgain, cmp.Or(id.Spec.Attachment, v1alpha1.Sidecar), id.Name)
	case disk != nil && filled && imageOf(p) != "":
		return fmt.Sprintf("it was made for another population than %s, which VMIdentity %s has"+
			madeAgain, cmp.Or(id.Spec.Population, v1alpha1.Overlay), id.Name)
	}
	return ""
}

// diskOf is the container of a pod that serves a disk, or nil.
func diskOf(p objects.Asking) *corev1.Container {
	return cmp.Or(objects.DiskContainer(&p.Spec), admission.Hook(p.Pod, p.Number))
}

// imageOf returns the image of a disk that admission gave to a pod, or "" if it is unknown.
func imageOf(p objects.Asking) string {
	disk := diskOf(p)
	if disk == nil {
		return ""
	}
	for _, m := range disk.VolumeMounts {
		for _, v := range p.Spec.Volumes {
			if v.Name == m.Name && v.Image != nil {
				return v.Image.Reference
			}
		}
	}
	return ""
}

// reference names a pod in a status.
func reference(p objects.Asking) *corev1.ObjectReference {
	return &corev1.ObjectReference{Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: p.UID}
}

// say sets the conditions about the use of the disk. first is the first waiting pod, with its
// reason.
func (d *decision) say(first *waitingPod) {
	c := metav1.Condition{Type: v1alpha1.ConditionInUse, Status: metav1.ConditionFalse,
		Reason: v1alpha1.ReasonNotInUse, Message: "no pod uses the disk"}
	status := &d.id.Status
	switch {
	case d.inUse:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonInUse
		c.Message = fmt.Sprintf("pod %s uses the disk", status.UsedBy.Name)
		if d.user != nil && objects.Unschedulable(d.user) != nil {
			c.Reason = v1alpha1.ReasonUnschedulable
			c.Message = fmt.Sprintf("pod %s has the disk and finds no node: `kubectl describe pod "+
				"%s` says why", d.user.Name, d.user.Name)
			if !meta.IsStatusConditionTrue(status.Conditions, v1alpha1.ConditionBound) {
				c.Message += fmt.Sprintf("; the claim has no volume: `kubectl describe pvc %s` "+
					"says why", v1alpha1.ClaimName(d.id.Name))
			}
		}
		if first != nil && (first.reason == v1alpha1.ReasonInUse ||
			first.pod == status.UsedBy.UID) {
			c.Message += "; " + first.message
		}
	case first != nil && !status.Ready && first.reason != v1alpha1.ReasonImageDiffers:
		// Condition Ready already reports it, and other controllers are writing the identity right
		// now.
		if meta.FindStatusCondition(status.Conditions, v1alpha1.ConditionInUse) == nil {
			return
		}
	case first != nil:
		c.Reason, c.Message = first.reason, first.message
	case meta.FindStatusCondition(status.Conditions, v1alpha1.ConditionInUse) == nil:
		// An identity that was never used needs no condition.
		return
	}
	objects.SetCondition(&status.Conditions, d.id.Generation, c)
	switch {
	case d.user != nil && d.user.Spec.NodeName != "":
		status.NodeName = d.user.Spec.NodeName
	case d.id.Spec.Type != v1alpha1.Local && (!d.inUse || d.user != nil):
		status.NodeName = ""
	}
}
