package objects

import (
	"context"
	"errors"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// Options are the settings of all controllers.
type Options struct {
	// Server is the image of kubevirt-disk that serves disks, and fetches and commits them.
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
	// PullCA is the name of the ConfigMap there with certificates (ca.crt) that are trusted for it,
	// too; "": none.
	PullCA string
	// Without lists features that are turned off. Objects that need one say so in their conditions,
	// and the controller needs no rights for it.
	Without []string
	// MoveImage is the image of kubevirt-disk-controller that moves disks of type Local to other
	// nodes; "": they stay where they are.
	MoveImage string
	// FillClaims fills the claims that name a VMImage as their source.
	FillClaims bool
	// Volumes makes the PersistentVolumes that identities with attachment Service ask for.
	Volumes bool
	// Namespaces to work in; none: all.
	Namespaces []string
	// Follow are the registries whose tags may be followed: HOST, or HOST/PATH with all below it.
	Follow []string
	// Concurrency is how many objects of a kind are handled at once. 0: one.
	Concurrency int
}

// Features that can be turned off.
const (
	Exports   = "exports"
	Pets      = "pets"
	Services  = "services"
	Snapshots = "snapshots"
)

// Off reports whether a feature is turned off.
func (o Options) Off(feature string) bool { return slices.Contains(o.Without, feature) }

// Kit is what every controller works with.
type Kit struct {
	// Client writes, and reads from the cache.
	client.Client
	// Live reads from the API server, because the cache may be late, and has not everything.
	Live    client.Reader
	Events  events.EventRecorder
	Options Options
	// Images says which images may be used. nil: all may.
	Images Images
	// Snapshots reads VolumeSnapshots. nil: the cluster has none, or they are turned off.
	Snapshots client.Reader
}

// NewKit is the kit of the controllers of a manager.
func NewKit(mgr ctrl.Manager, o Options) Kit {
	return Kit{Client: mgr.GetClient(), Live: mgr.GetAPIReader(), Options: o,
		Events: mgr.GetEventRecorder(v1alpha1.FieldManager)}
}

// For begins a controller for a kind of object.
func (k Kit) For(mgr ctrl.Manager, name string, object client.Object,
	options ...builder.ForOption) *builder.Builder {
	return ctrl.NewControllerManagedBy(mgr).Named(name).For(object, options...).
		WithOptions(working(k.Options.Concurrency))
}

// ForAsking is For for a controller that asks pods for their pages. It handles so many objects at
// once that pages which hang do not keep it from the others.
func (k Kit) ForAsking(mgr ctrl.Manager, name string, object client.Object) *builder.Builder {
	k.Options.Concurrency = max(k.Options.Concurrency, asking)
	return k.For(mgr, name, object)
}

// Reported is an object of ours with conditions.
type Reported interface {
	client.Object
	GetConditions() []metav1.Condition
}

// Report writes the status of an object if it differs from what it was before, and sends the events
// of the conditions that have changed. It is no error if the object is gone.
func (k Kit) Report(ctx context.Context, before, after Reported) error {
	return k.ReportAs(ctx, before, after, EventType)
}

// ReportAs is Report for a controller with events for other reasons. kind is used like EventType.
func (k Kit) ReportAs(ctx context.Context, before, after Reported,
	kind func(reason string) string) error {
	if err := PatchStatus(ctx, k.Client, before, after); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("status: %w", err)
	} else if err == nil {
		k.Tell(before, after, kind)
	}
	return nil
}

// SetFinalizer gives an object a finalizer, or takes it away. The change makes another request. It
// is no error if the object is gone.
func (k Kit) SetFinalizer(ctx context.Context, o client.Object, name string, want bool) error {
	if controllerutil.ContainsFinalizer(o, name) == want {
		return nil
	}
	err := Change(ctx, k.Client, o, func(o client.Object) {
		if want {
			controllerutil.AddFinalizer(o, name)
		} else {
			controllerutil.RemoveFinalizer(o, name)
		}
	})
	if err != nil {
		return fmt.Errorf("finalizer of %s: %w", o.GetName(), err)
	}
	return nil
}

// Fresh is a conflict if an identity, as it was read, is not the newest: the cache is late, or
// another controller leads by now.
func (k Kit) Fresh(ctx context.Context, id *v1alpha1.VMIdentity) error {
	now, err := Find[v1alpha1.VMIdentity](ctx, k.Live, "VMIdentity", client.ObjectKeyFromObject(id))
	if err == nil && (now == nil || now.ResourceVersion != id.ResourceVersion) {
		err = apierrors.NewConflict(schema.GroupResource{Group: v1alpha1.Group,
			Resource: "vmidentities"}, id.Name, errors.New("somebody has written it"))
	}
	return err
}
