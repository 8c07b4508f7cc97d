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
	// ClaimSize is the size of a claim if its identity has none.
	ClaimSize resource.Quantity
	// UsageTypes are the storage classes by the usage types that users may name.
	UsageTypes map[string]string
	// ReadWriteOnce are the storage classes whose volumes do not support ReadWriteOncePod. "*"
	// means all.
	ReadWriteOnce []string
	// SnapshotClass is the VolumeSnapshotClass of images; "": the driver's default.
	SnapshotClass string
	// PullSecret is the name of a secret in the namespaces of identities. It has the credential of
	// the registry from which images for snapshots are fetched; "": none.
	PullSecret string
	// PullCA is the name of a ConfigMap in these namespaces. It has additional certificates
	// (ca.crt) for that registry; "": none.
	PullCA string
	// Without lists features that are turned off. Objects that need one report this in their
	// conditions, and the controller needs no rights for it.
	Without []string
	// MoveImage is the image of kubevirt-disk-controller that moves disks of type Local to other
	// nodes; "": they stay where they are.
	MoveImage string
	// FillClaims fills the claims that name a VMImage as their source.
	FillClaims bool
	// Volumes makes the PersistentVolumes that identities with attachment Service request.
	Volumes bool
	// Namespaces to work in; none: all.
	Namespaces []string
	// Follow are the registries whose tags may be followed: HOST, or HOST/PATH with everything
	// below.
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

// Kit has the tools of every controller.
type Kit struct {
	// Client writes, and reads from the cache.
	client.Client
	// Live reads from the API server, because the cache may be late, and does not have everything.
	Live    client.Reader
	Events  events.EventRecorder
	Options Options
	// Images decides which images may be used. nil: all.
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
// once that some hanging pages do not block the others.
func (k Kit) ForAsking(mgr ctrl.Manager, name string, object client.Object) *builder.Builder {
	k.Options.Concurrency = max(k.Options.Concurrency, asking)
	return k.For(mgr, name, object)
}

// Reported is an object of our API group with conditions.
type Reported interface {
	client.Object
	GetConditions() []metav1.Condition
}

// Report writes the status of an object if it differs from that of before, and sends the events of
// the changed conditions. It is no error if the object is gone.
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

// SetFinalizer adds a finalizer to an object, or removes it. The change triggers another reconcile.
// It is no error if the object is gone.
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

// Fresh returns a conflict if an identity is not the newest version: the cache is late, or another
// controller leads now.
func (k Kit) Fresh(ctx context.Context, id *v1alpha1.VMIdentity) error {
	now, err := Find[v1alpha1.VMIdentity](ctx, k.Live, "VMIdentity", client.ObjectKeyFromObject(id))
	if err == nil && (now == nil || now.ResourceVersion != id.ResourceVersion) {
		err = apierrors.NewConflict(schema.GroupResource{Group: v1alpha1.Group,
			Resource: "vmidentities"}, id.Name, errors.New("somebody has written it"))
	}
	return err
}
