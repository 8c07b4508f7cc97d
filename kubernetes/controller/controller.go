package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/selection"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/export"
	"kubevirt.io/disk/kubernetes/controller/fill"
	"kubevirt.io/disk/kubernetes/controller/follow"
	"kubevirt.io/disk/kubernetes/controller/hydration"
	"kubevirt.io/disk/kubernetes/controller/identity"
	"kubevirt.io/disk/kubernetes/controller/local"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/pet"
	"kubevirt.io/disk/kubernetes/controller/pod"
	"kubevirt.io/disk/kubernetes/controller/service"
	"kubevirt.io/disk/kubernetes/controller/set"
	"kubevirt.io/disk/kubernetes/controller/snapshot"
	"kubevirt.io/disk/kubernetes/controller/verify"
)

// Options are the settings of all controllers.
type Options struct {
	// Server is the image of kubevirt-disk that serves disks.
	Server string
	// ClaimSize is the size of a claim whose identity names none.
	ClaimSize resource.Quantity
	// UsageTypes are the storage classes by the usage types that users may name.
	UsageTypes map[string]string
	// ReadWriteOnce are the storage classes whose volumes do not have ReadWriteOncePod. "*" means
	// all.
	ReadWriteOnce []string
	// SnapshotClass is the VolumeSnapshotClass of images; "": the driver's default.
	SnapshotClass string
	// PullSecret is the name of the secret, in the namespaces of identities, with the credential
	// of the registry from which images for snapshots are fetched; "": none.
	PullSecret string
	// PullCA is the name of the ConfigMap there with certificates that are trusted for it, too; "":
	// none.
	PullCA string
	// Without lists features of Optional that are turned off. Objects that need one say so in their
	// conditions, and the controller needs no rights for it.
	Without []string
	// MoveImage is the image of kubevirt-disk-controller that moves disks of type Local to other
	// nodes; "": they stay where they are.
	MoveImage string
	// FillClaims fills the claims that name a VMImage as their source.
	FillClaims bool
	// Volumes makes the PersistentVolumes that identities with attachment Service ask for.
	Volumes bool
	// Namespaces to work in, as given to Cache; none: all.
	Namespaces []string
	// Signatures says whose signatures images must have. The zero value: nobody's.
	Signatures verify.Options
	// Follow are the registries whose tags may be followed: see follow.Options.
	Follow []string
	// Concurrency is how many objects of a kind are handled at once.
	Concurrency int
}

// Features that can be turned off.
const (
	exports   = "exports"
	pets      = "pets"
	services  = "services"
	snapshots = "snapshots"
)

// Optional lists the features that Options.Without can turn off.
func Optional() []string { return []string{exports, pets, services, snapshots} }

// Check returns what is wrong with the options, in words for the person who set them.
func (o Options) Check() error {
	if o.ClaimSize.Sign() <= 0 {
		return fmt.Errorf("claim-size: %s is not above 0: write it as 20Gi", &o.ClaimSize)
	}
	if o.Concurrency < 1 {
		return fmt.Errorf("concurrency: %d is not above 0", o.Concurrency)
	}
	for _, name := range o.Without {
		if !slices.Contains(Optional(), name) {
			return fmt.Errorf("without: %q cannot be turned off: use %s", name,
				strings.Join(Optional(), ", "))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(o.UsageTypes)) {
		if name == "" || o.UsageTypes[name] == "" {
			return fmt.Errorf("usage-type: %s=%s: write it as NAME=CLASS", name,
				o.UsageTypes[name])
		}
	}
	return nil
}

// Setup adds every controller to a manager that was made with Scheme and Cache.
func Setup(mgr ctrl.Manager, o Options) error {
	if err := o.Check(); err != nil {
		return err
	}
	// Several controllers look for the pods of an identity. A cache that is not started yet waits
	// for nothing.
	if err := mgr.GetFieldIndexer().IndexField(context.Background(), &corev1.Pod{},
		objects.IndexIdentity, objects.ByIdentity); err != nil {
		return err
	}
	o.Signatures.Concurrency = o.Concurrency
	verifier := &verify.Verifier{Live: mgr.GetAPIReader(), Options: o.Signatures}
	may, err := verify.Setup(mgr, verifier)
	if err != nil {
		return err
	}
	volumeSnapshots, err := snapshot.Setup(mgr, snapshot.Options{Server: o.Server,
		ClaimSize: o.ClaimSize, UsageTypes: o.UsageTypes, SnapshotClass: o.SnapshotClass,
		PullSecret: o.PullSecret, PullCA: o.PullCA, Concurrency: o.Concurrency, Images: may,
		Off: slices.Contains(o.Without, snapshots)})
	if err != nil {
		return err
	}
	var mover pod.Mover
	if o.MoveImage != "" {
		mover = &local.Wishes{Live: mgr.GetAPIReader()}
		if err := local.Setup(mgr, local.Options{Image: o.MoveImage,
			Concurrency: o.Concurrency}); err != nil {
			return err
		}
	}
	if o.FillClaims {
		f := fill.Options{Server: o.Server, Namespaces: o.Namespaces, Concurrency: o.Concurrency}
		if o.Signatures.Policies != "" {
			f.Keys = verifier.Keys
		}
		if err := fill.Setup(mgr, f); err != nil {
			return err
		}
	}
	return errors.Join(
		pet.Setup(mgr, pet.Options{Off: slices.Contains(o.Without, pets),
			Concurrency: o.Concurrency}),
		export.Setup(mgr, export.Options{Off: slices.Contains(o.Without, exports),
			Server: o.Server, Concurrency: o.Concurrency, Images: may}),
		service.Setup(mgr, service.Options{Off: slices.Contains(o.Without, services),
			Server: o.Server, Volumes: o.Volumes, ClaimSize: o.ClaimSize,
			Concurrency: o.Concurrency, Images: may}),
		identity.Setup(mgr, identity.Options{ClaimSize: o.ClaimSize, UsageTypes: o.UsageTypes,
			ReadWriteOnce: o.ReadWriteOnce, Snapshots: volumeSnapshots, Concurrency: o.Concurrency,
			Images: may}),
		pod.Setup(mgr, pod.Options{Mover: mover, Concurrency: o.Concurrency, Images: may}),
		set.Setup(mgr, set.Options{UsageTypes: o.UsageTypes, Snapshots: volumeSnapshots != nil,
			Concurrency: o.Concurrency}),
		follow.Setup(mgr, &follow.Reconciler{Verifier: verifier, Options: follow.Options{
			Registries: o.Follow, Concurrency: o.Concurrency}}),
		hydration.Setup(mgr, hydration.Options{Concurrency: o.Concurrency}),
	)
}

// Scheme has the types that the controllers read and write.
func Scheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	if err := clientgoscheme.AddToScheme(s); err != nil {
		return nil, err
	}
	return s, v1alpha1.AddToScheme(s)
}

// Cache limits the read and kept objects to those of identities. Without namespaces it covers all
// of them.
func Cache(namespaces ...string) (cache.Options, error) {
	exists, err := labels.NewRequirement(v1alpha1.LabelIdentity, selection.Exists, nil)
	if err != nil {
		return cache.Options{}, err
	}
	ours := cache.ByObject{Label: labels.NewSelector().Add(*exists)}
	o := cache.Options{
		ReaderFailOnMissingInformer: true,
		// Nothing here needs to know who owns which field, and that is half of a small object's
		// memory.
		DefaultTransform: cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Pod{}:                   ours,
			&corev1.PersistentVolumeClaim{}: ours,
			&corev1.Service{}:               ours,
			&appsv1.Deployment{}:            ours,
			&batchv1.Job{}:                  ours,
		},
	}
	if len(namespaces) > 0 {
		o.DefaultNamespaces = map[string]cache.Config{}
		for _, n := range namespaces {
			o.DefaultNamespaces[n] = cache.Config{}
		}
	}
	return o, nil
}
