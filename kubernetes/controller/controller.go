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
	"kubevirt.io/disk/kubernetes/controller/identity"
	"kubevirt.io/disk/kubernetes/controller/local"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/controller/pet"
	"kubevirt.io/disk/kubernetes/controller/pod"
	"kubevirt.io/disk/kubernetes/controller/service"
	"kubevirt.io/disk/kubernetes/controller/set"
	"kubevirt.io/disk/kubernetes/controller/snapshot"
	"kubevirt.io/disk/kubernetes/controller/state"
	"kubevirt.io/disk/kubernetes/controller/verify"
)

// Options are the settings of all controllers.
type Options struct {
	objects.Options
	// Signatures has the required signatures of images. The zero value: none.
	Signatures verify.Options
}

// Optional lists the features that Options.Without can turn off.
func Optional() []string {
	return []string{objects.Exports, objects.Pets, objects.Services, objects.Snapshots}
}

// Check returns the errors in the options, in words for the person who set them.
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
			return fmt.Errorf("usage-type: %s=%s: write it as NAME=CLASS", name, o.UsageTypes[name])
		}
	}
	return nil
}

// Setup adds every controller to a manager that was made with Scheme and Cache. Check must
// have returned nil before.
func Setup(mgr ctrl.Manager, o Options) error {
	// Several controllers look for the pods of an identity. This does not wait for the cache, which
	// is not started yet.
	if err := mgr.GetFieldIndexer().IndexField(context.Background(), &corev1.Pod{},
		objects.IndexIdentity, objects.ByIdentity); err != nil {
		return err
	}
	kit := objects.NewKit(mgr, o.Options)
	verifier := &verify.Verifier{Live: kit.Live, Options: o.Signatures}
	var err error
	if kit.Images, err = verify.Setup(mgr, kit, verifier); err != nil {
		return err
	}
	if kit.Snapshots, err = snapshot.Setup(mgr, kit); err != nil {
		return err
	}
	if o.FillClaims {
		var keys fill.Keys
		if o.Signatures.Policies != "" {
			keys = verifier.Keys
		}
		if err := fill.Setup(mgr, kit, keys); err != nil {
			return err
		}
	}
	return errors.Join(pet.Setup(mgr, kit), export.Setup(mgr, kit), service.Setup(mgr, kit),
		local.Setup(mgr, kit), identity.Setup(mgr, kit), pod.Setup(mgr, kit), set.Setup(mgr, kit),
		follow.Setup(mgr, kit, verifier), state.Setup(mgr, kit))
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
		// The controllers do not need the owners of fields, which take half of the memory of a
		// small object.
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
