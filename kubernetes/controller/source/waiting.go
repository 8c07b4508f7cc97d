package source

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// Gone returns why a claim that was made from a source will not get its volume: the source is gone.
// A snapshot of an image is made again, under the same name. If the claim got its source from
// elsewhere, such as a backup, its state is unknown.
func (f Finder) Gone(ctx context.Context, id *v1alpha1.VMIdentity,
	claim *corev1.PersistentVolumeClaim) (Answer, error) {
	s, from := id.Spec.Source, claim.Spec.DataSourceRef
	if from == nil || claim.Status.Phase == corev1.ClaimBound {
		return Answer{}, nil
	}
	var there bool
	var err error
	switch {
	case s == nil && f.Snapshots != nil && strings.HasPrefix(from.Name, goldenPrefix):
		// Use the name, and not the class: the API server has given the claim a class if the
		// identity has none.
		return f.fromImage(ctx, id, from.Name)
	case s != nil && from.Name == v1alpha1.VolumeSnapshotName(string(s.Snapshot)):
		var snapshot *v1alpha1.VMIdentitySnapshot
		snapshot, err = f.snapshot(ctx, id.Namespace, string(s.Snapshot))
		there = snapshot != nil
	case s != nil && s.Snapshot == "" && clones(id, claim):
		var source *corev1.PersistentVolumeClaim
		source, err = objects.ClaimOf(ctx, f.Live, id.Namespace, from.Name)
		there = source != nil
	default:
		return Answer{}, nil
	}
	if there || err != nil {
		return Answer{}, err
	}
	return not(v1alpha1.ReasonSourceMissing, "%s, from which the disk begins, was deleted before "+
		"the disk had its volume: delete this VMIdentity", s)
}

// clones reports whether a claim is made from the source of its identity.
func clones(id *v1alpha1.VMIdentity, claim *corev1.PersistentVolumeClaim) bool {
	s, from := id.Spec.Source, claim.Spec.DataSourceRef
	return from != nil && from.Kind == "PersistentVolumeClaim" &&
		from.Name == cmp.Or(string(s.Claim), v1alpha1.ClaimName(string(s.Identity)))
}

// Used returns an answer if a pod uses the source of a claim without a volume. The class may make
// the volume for the first pod, long after Find has answered. That pod may have the source, too: it
// does not run yet.
func (f Finder) Used(ctx context.Context, id *v1alpha1.VMIdentity,
	claim *corev1.PersistentVolumeClaim, first types.UID) (Answer, error) {
	if claim.Status.Phase == corev1.ClaimBound || !clones(id, claim) {
		return Answer{}, nil
	}
	return f.used(ctx, id, first)
}

// Waiting returns an identity whose claim needs a source because it has no volume yet, or "". An
// identity without a claim does not count: it gets none while the source is being deleted, so both
// would wait for each other. Waiting asks the API server for the claim, because the cache may not
// have it yet.
func (f Finder) Waiting(ctx context.Context, namespace string, source v1alpha1.DiskSource) (string,
	error) {
	var ids v1alpha1.VMIdentityList
	if err := f.Client.List(ctx, &ids, client.InNamespace(namespace)); err != nil {
		return "", fmt.Errorf("VMIdentities: %w", err)
	}
	for i := range ids.Items {
		id := &ids.Items[i]
		if id.Spec.Source == nil || *id.Spec.Source != source || id.DeletionTimestamp != nil ||
			meta.IsStatusConditionTrue(id.Status.Conditions, v1alpha1.ConditionBound) {
			continue
		}
		claim, err := objects.Claim(ctx, f.Live, id)
		if err != nil {
			return "", err
		}
		if claim != nil && metav1.IsControlledBy(claim, id) && claim.DeletionTimestamp == nil &&
			claim.Status.Phase != corev1.ClaimBound && claim.Status.Phase != corev1.ClaimLost {
			return id.Name, nil
		}
	}
	return "", nil
}

// Index is the index of identities by their sources, in the form of DiskSource.String.
const Index = v1alpha1.Group + "/source"

// By returns the keys of an identity in Index.
func By(o client.Object) []string {
	id, ok := o.(*v1alpha1.VMIdentity)
	if !ok || id.Spec.Source == nil {
		return nil
	}
	return []string{id.Spec.Source.String()}
}

// Clones requests the identities with an identity or a snapshot as their source.
func Clones(c client.Reader) func(ctx context.Context, o client.Object) []reconcile.Request {
	return func(ctx context.Context, o client.Object) (all []reconcile.Request) {
		name := v1alpha1.SourceName(o.GetName())
		source := v1alpha1.DiskSource{Identity: name}
		if _, snapshot := o.(*v1alpha1.VMIdentitySnapshot); snapshot {
			source = v1alpha1.DiskSource{Snapshot: name}
		}
		var ids v1alpha1.VMIdentityList
		// A cache that has started does not fail.
		_ = c.List(ctx, &ids, client.InNamespace(o.GetNamespace()),
			client.MatchingFields{Index: source.String()}, client.UnsafeDisableDeepCopy)
		for i := range ids.Items {
			all = append(all, reconcile.Request{
				NamespacedName: client.ObjectKeyFromObject(&ids.Items[i])})
		}
		return all
	}
}
