package source

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

// Finder finds the sources of claims. Live reads those that are not of our API group, which are not
// in the cache.
type Finder struct{ objects.Kit }

// Answer is the source of a claim, or the reason why there is none yet.
type Answer struct {
	// From is nil for an empty claim, and if there is a Reason.
	From *corev1.TypedObjectReference
	// AtLeast is the smallest size of the claim; 0: any.
	AtLeast         resource.Quantity
	Reason, Message string
}

// not returns why a claim cannot be made yet.
func not(reason, format string, args ...any) (Answer, error) {
	return Answer{Reason: reason, Message: fmt.Sprintf(format, args...)}, nil
}

// Empty reports whether the claim of an identity is empty at first: its disk needs no source.
func Empty(id *v1alpha1.VMIdentity) bool {
	return id.Spec.Source == nil && !OfImage(&id.Spec.DiskSpec)
}

// Find returns the source of the claim of an identity. class is the storage class of the claim, as
// for objects.Class. When the answer changes, the status of the identity or of its source changes,
// too.
func (f Finder) Find(ctx context.Context, id *v1alpha1.VMIdentity, class *string) (Answer, error) {
	s := id.Spec.Source
	switch {
	case Empty(id):
		return Answer{}, nil
	case s == nil:
		return f.fromImage(ctx, id, Golden(id.Spec.Image, class))
	case s.Claim != "":
		return f.fromClaim(ctx, id, string(s.Claim), class)
	case s.Identity != "":
		return f.fromIdentity(ctx, id, string(s.Identity), class)
	}
	return f.fromSnapshot(ctx, id, string(s.Snapshot), class)
}

// missing is the answer for an object that does not exist, or is being deleted.
func missing(kind, name string, o client.Object) (Answer, error) {
	if o != nil {
		return not(v1alpha1.ReasonSourceMissing, "the %s %s, from which the disk begins, is being "+
			"deleted: delete this VMIdentity, too, or make both again", kind, name)
	}
	return not(v1alpha1.ReasonSourceMissing, "there is no %s %s in the namespace, from which the "+
		"disk begins: make it, or delete this VMIdentity", kind, name)
}

func (f Finder) fromClaim(ctx context.Context, id *v1alpha1.VMIdentity, name string,
	class *string) (Answer, error) {
	claim, err := objects.ClaimOf(ctx, f.Live, id.Namespace, name)
	switch {
	case err != nil:
		return Answer{}, err
	case claim == nil:
		return missing("claim", name, nil)
	case claim.DeletionTimestamp != nil:
		return missing("claim", name, claim)
	}
	if _, ours := claim.Labels[v1alpha1.LabelIdentity]; ours || strings.HasPrefix(name,
		v1alpha1.ClaimName("")) || controlledByIdentity(claim) {
		return not(v1alpha1.ReasonInvalid, "the claim %s is of a VMIdentity: name that in "+
			"source.identity of another VMIdentity, or a VMIdentitySnapshot of it", name)
	}
	if mode := claim.Spec.VolumeMode; mode != nil && *mode == corev1.PersistentVolumeBlock {
		return not(v1alpha1.ReasonInvalid, "the claim %s has a block volume, and no file "+
			"disk.img: copy the disk into a claim with a file system", name)
	}
	if a, err := f.used(ctx, id, ""); a.Reason != "" || err != nil {
		return a, err
	}
	return f.clone(ctx, claim, class)
}

// used returns an answer if a pod, except one, may write to the claim or to the identity that is a
// source. It asks the API server: the cache may be late, and a pod that has just left its gate
// writes.
func (f Finder) used(ctx context.Context, id *v1alpha1.VMIdentity, except types.UID) (Answer,
	error) {
	itself := func(p corev1.Pod) bool { return p.UID == except }
	if name := id.Spec.Source.Identity; name != "" {
		from := &metav1.ObjectMeta{Namespace: id.Namespace, Name: string(name)}
		pods, err := objects.PodsWith(ctx, f.Live, from)
		if err != nil {
			return Answer{}, err
		}
		if pod := objects.User(slices.DeleteFunc(pods, itself), from); pod != "" {
			return not(v1alpha1.ReasonSourceInUse, "pod %s uses the disk of VMIdentity %s: the "+
				"disk is made when that pod has ended; from a VMIdentitySnapshot it begins at once",
				pod, name)
		}
		return Answer{}, nil
	}
	name := string(id.Spec.Source.Claim)
	pods := &corev1.PodList{}
	if err := f.Live.List(ctx, pods, client.InNamespace(id.Namespace)); err != nil {
		return Answer{}, fmt.Errorf("pods: %w", err)
	}
	for _, pod := range slices.DeleteFunc(pods.Items, itself) {
		if !objects.Finished(&pod) && objects.Writes(&pod, name) {
			return not(v1alpha1.ReasonSourceInUse, "pod %s may write to the claim %s, from which "+
				"the disk begins: the disk is made when that pod has ended", pod.Name, name)
		}
	}
	return Answer{}, nil
}

func controlledByIdentity(claim *corev1.PersistentVolumeClaim) bool {
	owner := metav1.GetControllerOf(claim)
	return owner != nil && owner.Kind == "VMIdentity" &&
		strings.HasPrefix(owner.APIVersion, v1alpha1.Group+"/")
}

func (f Finder) fromIdentity(ctx context.Context, id *v1alpha1.VMIdentity, name string,
	class *string) (Answer, error) {
	from, err := f.identity(ctx, id.Namespace, name)
	switch {
	case err != nil:
		return Answer{}, err
	case from == nil:
		return missing("VMIdentity", name, nil)
	case from.DeletionTimestamp != nil:
		return missing("VMIdentity", name, from)
	case !from.Spec.MayBeClonedBy(id.Name):
		return not(v1alpha1.ReasonNotCloneable, "VMIdentity %s does not agree to a clone: add %q "+
			"to its spec.cloneableBy", name, id.Name)
	}
	if a, err := differs(id, "VMIdentity "+name, v1alpha1.SnapshotDisk{Image: from.Spec.Image,
		Population: from.Spec.Population, BlockSize: from.Spec.BlockSize,
		Size: from.Spec.Size}); a.Reason != "" || err != nil {
		return a, err
	}
	if from.Spec.Type == v1alpha1.Local {
		return not(v1alpha1.ReasonInvalid, "VMIdentity %s has type Local, and Local disks are not "+
			"cloned", name)
	}
	claim, err := objects.ClaimOf(ctx, f.Live, id.Namespace, v1alpha1.ClaimName(name))
	if err != nil {
		return Answer{}, err
	}
	if from.Status.CreationTime == nil || claim == nil ||
		claim.DeletionTimestamp != nil || !metav1.IsControlledBy(claim, from) {
		// Do not include its message: two identities that are each other's source would repeat it
		// for ever.
		return not(v1alpha1.ReasonPopulating, "VMIdentity %s has no disk yet, from which this one "+
			"begins: `kubectl describe vmid %[1]s` says why", name)
	}
	if a, err := f.used(ctx, id, ""); a.Reason != "" || err != nil {
		return a, err
	}
	return f.clone(ctx, claim, class)
}

func (f Finder) fromSnapshot(ctx context.Context, id *v1alpha1.VMIdentity, name string,
	class *string) (Answer, error) {
	from, err := f.snapshot(ctx, id.Namespace, name)
	switch {
	case err != nil:
		return Answer{}, err
	case from == nil:
		return missing("VMIdentitySnapshot", name, nil)
	case from.DeletionTimestamp != nil:
		return missing("VMIdentitySnapshot", name, from)
	case !from.Status.ReadyToUse || from.Status.Disk == nil:
		return not(v1alpha1.ReasonPopulating, "VMIdentitySnapshot %s is not ready: `kubectl "+
			"describe vmidsnap %[1]s` says why", name)
	}
	if a, err := differs(id, "VMIdentitySnapshot "+name, *from.Status.Disk); a.Reason != "" ||
		err != nil {
		return a, err
	}
	if a, err := f.driver(ctx, class, ""); a.Reason != "" || err != nil {
		return a, err
	}
	a := Answer{From: fromVolumeSnapshot(from.Status.VolumeSnapshotName)}
	if from.Status.RestoreSize != nil {
		a.AtLeast = *from.Status.RestoreSize
	}
	return a, nil
}

// differs returns why a disk cannot use the content of another one.
func differs(id *v1alpha1.VMIdentity, name string, from v1alpha1.SnapshotDisk) (Answer, error) {
	is, was := populationOf(id.Spec.Population), populationOf(from.Population)
	block := (&v1alpha1.DiskSpec{BlockSize: from.BlockSize}).Block()
	switch {
	case id.Spec.Image != from.Image:
		return not(v1alpha1.ReasonInvalid, "the disk begins from %s, which has image %s, and this "+
			"VMIdentity has %s: make one with the same image", name, cmp.Or(from.Image, "none"),
			cmp.Or(id.Spec.Image, "none"))
	case is != was:
		return not(v1alpha1.ReasonInvalid, "the disk begins from %s, which has population %s, and "+
			"this VMIdentity has %s: make one with the same population", name, was, is)
	case id.Spec.Block() != block:
		return not(v1alpha1.ReasonInvalid, "the disk begins from %s, which has logical blocks of "+
			"%d bytes, and this VMIdentity has %d: a guest finds nothing with blocks of another "+
			"length, so make one with blockSize %[2]d", name, block, id.Spec.Block())
	case id.Spec.Size != nil && from.Size != nil && id.Spec.Size.Cmp(*from.Size) < 0:
		return not(v1alpha1.ReasonInvalid, "the disk begins from %s, which has %s, and this "+
			"VMIdentity has %s: a disk never shrinks, so set a size of at least that", name,
			from.Size, id.Spec.Size)
	}
	return Answer{}, nil
}

func populationOf(p v1alpha1.Population) v1alpha1.Population {
	return cmp.Or(p, v1alpha1.Overlay)
}

// Kubernetes records the provisioner of its volume on a claim.
const (
	annotationProvisioner     = "volume.kubernetes.io/storage-provisioner"
	annotationProvisionerBeta = "volume.beta.kubernetes.io/storage-provisioner"
)

// clone returns a claim as the source for a claim of a class.
func (f Finder) clone(ctx context.Context, claim *corev1.PersistentVolumeClaim, class *string) (
	Answer, error) {
	if claim.Status.Phase != corev1.ClaimBound {
		return not(v1alpha1.ReasonPopulating, "the claim %s, from which the disk begins, has no "+
			"volume yet: many classes make one when a pod is scheduled", claim.Name)
	}
	has := cmp.Or(claim.Annotations[annotationProvisioner],
		claim.Annotations[annotationProvisionerBeta])
	if a, err := f.driver(ctx, class, has); a.Reason != "" || err != nil {
		return a, err
	}
	a := Answer{From: &corev1.TypedObjectReference{Kind: "PersistentVolumeClaim",
		Name: claim.Name}, AtLeast: claim.Status.Capacity[corev1.ResourceStorage]}
	if asked := claim.Spec.Resources.Requests[corev1.ResourceStorage]; asked.Cmp(a.AtLeast) > 0 {
		a.AtLeast = asked
	}
	return a, nil
}

// driver returns why a class cannot clone a volume of a provisioner ("": unknown).
func (f Finder) driver(ctx context.Context, class *string, provisioner string) (Answer, error) {
	c, err := objects.Class(ctx, f.Client, class)
	if err != nil {
		return Answer{}, err
	}
	if c == nil {
		return not(v1alpha1.ReasonInvalid, "the disk begins from another one, and only a "+
			"StorageClass clones it: make a VMIdentity that names one")
	}
	driver, err := objects.Find[storagev1.CSIDriver](ctx, f.Client, "CSIDriver",
		client.ObjectKey{Name: c.Provisioner})
	switch {
	case err != nil:
		return Answer{}, err
	case driver == nil:
		return not(v1alpha1.ReasonInvalid, "the StorageClass %s cannot clone a disk: its "+
			"provisioner %s is none of those that `kubectl get csidriver` lists. Make a "+
			"VMIdentity with another class", c.Name, c.Provisioner)
	case provisioner != "" && provisioner != c.Provisioner:
		return not(v1alpha1.ReasonInvalid, "the disk begins from one on the storage of %[1]s, "+
			"and the StorageClass %s is of %s: make a VMIdentity with a class of %[1]s",
			provisioner, c.Name, c.Provisioner)
	}
	return Answer{}, nil
}

func (f Finder) identity(ctx context.Context, namespace, name string) (*v1alpha1.VMIdentity,
	error) {
	return objects.Find[v1alpha1.VMIdentity](ctx, f.Client, "VMIdentity",
		client.ObjectKey{Namespace: namespace, Name: name})
}

func (f Finder) snapshot(ctx context.Context, namespace, name string) (
	*v1alpha1.VMIdentitySnapshot, error) {
	return objects.Find[v1alpha1.VMIdentitySnapshot](ctx, f.Client, "VMIdentitySnapshot",
		client.ObjectKey{Namespace: namespace, Name: name})
}
