// Package follow asks registries for the images of the tags that sets follow, and writes into the
// status of a set the digest for new identities. Existing identities keep theirs: a tag never
// changes a disk under a guest.
//
// A registry is not trusted. An image is taken only if the policy for signatures of the namespace
// admits it. A registry that does not answer, or whose answer is refused, changes nothing. If a tag
// returns to an earlier image, it is followed, and reported: somebody with access to the registry
// could bring back a signed image with a known fault.
//
// Only registries in the administrator's list are asked: a tenant cannot let the controller send
// requests to other places.
package follow

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/verify"
	"kubevirt.io/disk/registry/transport"
)

// Reconciler follows tags.
type Reconciler struct {
	objects.Kit
	Verifier *verify.Verifier
}

// Setup adds the controller to a manager.
func Setup(mgr ctrl.Manager, kit objects.Kit, v *verify.Verifier) error {
	r := &Reconciler{kit, v}
	return r.
		// Others write the status often, which is no reason to ask a registry.
		For(mgr, "follow", &v1alpha1.VMIdentitySet{}, builder.WithPredicates(objects.NewSpec())).
		Complete(objects.Reconciler(r))
}

const (
	usually = time.Hour
	atLeast = time.Minute
	// maxEarlier is how many digests are remembered.
	maxEarlier = 32
)

// Reconcile asks for the image of the tag of one set.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	before, err := objects.Find[v1alpha1.VMIdentitySet](ctx, r.Client, "VMIdentitySet",
		req.NamespacedName)
	if before == nil || err != nil || before.DeletionTimestamp != nil {
		return ctrl.Result{}, err
	}
	set, news := before.DeepCopy(), ""
	requeueAfter := time.Duration(0)
	if set.Spec.Follow == nil {
		set.Status.Followed = nil
		meta.RemoveStatusCondition(&set.Status.Conditions, v1alpha1.ConditionFollowed)
	} else {
		c, changed, err := r.resolve(ctx, set)
		if err != nil {
			return ctrl.Result{}, err
		}
		c.Type = v1alpha1.ConditionFollowed
		objects.SetCondition(&set.Status.Conditions, set.Generation, c)
		if requeueAfter = interval(set); c.Reason == v1alpha1.ReasonUnverified {
			requeueAfter = atLeast
		}
		if changed {
			news = c.Message
		}
	}
	return ctrl.Result{RequeueAfter: requeueAfter}, r.report(ctx, before, set, news)
}

// report writes the status, and sends an event for each change of the digest, and one for each
// problem.
func (r *Reconciler) report(ctx context.Context, before, set *v1alpha1.VMIdentitySet,
	news string) error {
	err := r.ReportAs(ctx, before, set, func(reason string) string {
		if reason == v1alpha1.ReasonFollowed || reason == v1alpha1.ReasonWentBack {
			return ""
		}
		return objects.EventType(reason)
	})
	if news != "" && err == nil {
		c := meta.FindStatusCondition(set.Status.Conditions, v1alpha1.ConditionFollowed)
		objects.Event(r.Events, set, nil, c.Reason, news)
	}
	return err
}

func interval(set *v1alpha1.VMIdentitySet) time.Duration {
	if i := set.Spec.Follow.Interval; i != nil {
		return max(i.Duration, atLeast)
	}
	return usually
}

// allowed reports whether the administrator allows following tags of a reference's repository.
func (r *Reconciler) allowed(ref transport.Reference) bool {
	name := ref.RepositoryText()
	return ref.Remote() && slices.ContainsFunc(r.Options.Follow, func(prefix string) bool {
		return name == prefix || strings.HasPrefix(name, strings.TrimSuffix(prefix, "/")+"/")
	})
}

// resolve asks the registry, and changes the status if the tag has another image. changed: it has.
func (r *Reconciler) resolve(ctx context.Context, set *v1alpha1.VMIdentitySet) (c metav1.Condition,
	changed bool, err error) {
	from := v1alpha1.RepositoryOf(set.Spec.Image)
	name := from + ":" + set.Spec.Follow.Tag
	f := set.Status.Followed
	if f != nil && f.Tag != set.Spec.Follow.Tag {
		f, set.Status.Followed = nil, nil
	}
	not := func(reason, format string, args ...any) (metav1.Condition, bool, error) {
		return metav1.Condition{Status: metav1.ConditionFalse, Reason: reason,
			Message: fmt.Sprintf(format, args...) + "; new disks begin from " +
				v1alpha1.DigestOf(set.NewImage())}, false, nil
	}
	ref, err := transport.ParseReference(name)
	if err != nil || !r.allowed(ref) {
		return not(v1alpha1.ReasonInvalid, "the tags of %s are not followed: the administrator of "+
			"the cluster names the registries (--follow-registry)", from)
	}
	found, err := r.Verifier.Resolve(ctx, set.Namespace, ref)
	if err != nil {
		return c, false, err
	}
	if found.Reason != "" {
		return not(found.Reason, "%s: %s", name, found.Message)
	}
	c = metav1.Condition{Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonFollowed}
	switch {
	case f == nil:
		f, changed = &v1alpha1.FollowedStatus{Tag: set.Spec.Follow.Tag}, true
		c.Message = fmt.Sprintf("%s names %s", name, found.Digest)
	case v1alpha1.DigestOf(f.Image) == found.Digest:
		if old := meta.FindStatusCondition(set.Status.Conditions,
			v1alpha1.ConditionFollowed); old != nil && old.Status == metav1.ConditionTrue {
			return *old, false, nil
		}
		c.Message = fmt.Sprintf("%s names %s", name, found.Digest)
	default:
		was := v1alpha1.DigestOf(f.Image)
		c.Message = fmt.Sprintf("%s names %s now, and before it was %s", name, found.Digest, was)
		if slices.Contains(f.Earlier, found.Digest) ||
			found.Digest == v1alpha1.DigestOf(set.Spec.Image) {
			c.Reason = v1alpha1.ReasonWentBack
			c.Message = fmt.Sprintf("%s went back to %s, and before it was %s: new disks begin "+
				"from the older image", name, found.Digest, was)
		}
		earlier := slices.DeleteFunc(slices.Clone(f.Earlier), func(d string) bool {
			return d == was || d == found.Digest
		})
		earlier = slices.Insert(earlier, 0, was)
		f.Earlier, changed = earlier[:min(len(earlier), maxEarlier)], true
	}
	if changed {
		f.Image = from + "@" + found.Digest
		set.Status.Followed = f
	}
	return c, changed, nil
}
