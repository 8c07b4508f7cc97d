// Package controllertest is an API server in memory for tests of controllers. Any request can fail:
// before it was carried out, or after, as if the controller had been killed.
package controllertest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/managedfields"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// Namespace is where the objects of tests are.
const Namespace = "test"

// Index is an index of the cache that a controller needs.
type Index struct {
	Object client.Object
	Field  string
	Of     client.IndexerFunc
}

// World is the API server. Controllers use Client, as a cache, and Live; the test itself uses Base,
// which never fails.
type World struct {
	Client, Live, Base client.WithWatch

	// Calls are the requests of controllers, of which one may fail.
	Calls *Calls
	// Refuse is called before each request that makes or changes an object, unless it is nil.
	Refuse func(verb string, object any) error
	// Check is called after each request that changed something, unless it is nil.
	Check func()

	writes int
	made   map[string]int
	uid    int
	events []string
}

// New makes a world with objects.
func New(t testing.TB, indexes []Index, objects ...client.Object) *World {
	t.Helper()
	// The fake goes through all kinds at each write, so it has only a few.
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Pod{}, &corev1.PodList{},
		&corev1.PersistentVolumeClaim{}, &corev1.PersistentVolumeClaimList{},
		&corev1.Secret{}, &corev1.SecretList{}, &corev1.Namespace{})
	metav1.AddToGroupVersion(scheme, corev1.SchemeGroupVersion)
	require.NoError(t, errors.Join(storagev1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)))
	b := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&v1alpha1.VMIdentity{},
		&v1alpha1.VMIdentitySet{}, &corev1.Pod{}, &corev1.PersistentVolumeClaim{}).
		// Reading the schemas of all kinds takes longer than a test.
		WithTypeConverters(managedfields.NewDeducedTypeConverter())
	for _, i := range indexes {
		b = b.WithIndex(i.Object, i.Field, i.Of)
	}
	w := &World{Base: b.Build(), Calls: new(Calls), made: make(map[string]int)}
	w.Allow(t, Settings{})
	for _, o := range objects {
		w.Make(t, o)
	}
	return w
}

// Allow gives controllers the rights that they have with other settings of the chart than none.
func (w *World) Allow(t testing.TB, s Settings) {
	t.Helper()
	role, base := RoleOf(t, s), intercept(w.Base, func(r request, do func() error) error {
		return w.Calls.request(r, func() error { return w.request(r, do) })
	})
	w.Client, w.Live = role.Cache(base), role.Live(base)
}

// Make makes an object as a user does.
func (w *World) Make(t testing.TB, o client.Object) {
	t.Helper()
	w.born(o)
	require.NoError(t, w.Base.Create(t.Context(), o))
}

// Writes is how many requests changed something.
func (w *World) Writes() int { return w.writes }

// Made is how many objects of a kind, such as "Secret", were made.
func (w *World) Made(kind string) int { return w.made[kind] }

// Events are the reasons of the events, in order.
func (w *World) Events() []string { return w.events }

// Eventf lets a World be an events.EventRecorder.
func (w *World) Eventf(_, _ runtime.Object, kind, reason, _, _ string, _ ...any) {
	w.events = append(w.events, kind+" "+reason)
}

// born sets the fields that the API server sets in a new object.
func (w *World) born(o client.Object) {
	w.uid++
	o.SetUID(types.UID(fmt.Sprintf("uid-%d", w.uid)))
	o.SetCreationTimestamp(metav1.Unix(int64(1_000_000+w.uid), 0))
	everywhere := false
	switch o.(type) {
	case *storagev1.StorageClass, *storagev1.CSIDriver, *corev1.Namespace:
		everywhere = true
	}
	if !everywhere && o.GetNamespace() == "" {
		o.SetNamespace(Namespace)
	}
}

// request carries out a request, unless the test refuses it.
func (w *World) request(r request, do func() error) error {
	verb := strings.TrimSpace(r.verb + " " + r.sub)
	if w.Refuse != nil && (r.changes() || r.dry && w.absent(r) == nil) {
		if err := w.Refuse(verb, r.object); err != nil {
			return err
		}
	}
	var err error
	switch {
	case r.dry:
		err = w.absent(r)
	case r.verb == "create":
		w.born(r.object.(client.Object))
		fallthrough
	default:
		err = do()
	}
	if err == nil && r.changes() {
		w.writes++
		if kind, err := r.kind(w.Base); r.verb == "create" && err == nil {
			w.made[kind.Kind]++
		}
		if w.Check != nil {
			w.Check()
		}
	}
	return err
}

// absent is what a dry run finds, which the fake client lacks: that an object exists.
func (w *World) absent(r request) error {
	kind, err := r.kind(w.Base)
	if err != nil {
		return err
	}
	o := r.object.(client.Object)
	there := &metav1.PartialObjectMetadata{}
	there.SetGroupVersionKind(kind)
	if w.Base.Get(r.ctx, client.ObjectKeyFromObject(o), there) == nil {
		return apierrors.NewAlreadyExists(schema.GroupResource{Resource: kind.Kind}, o.GetName())
	}
	return nil
}

// Reconciler is a controller.
type Reconciler interface {
	Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error)
}

// Once lets a controller handle the object of a name in Namespace once.
func Once(t testing.TB, r Reconciler, name string) (ctrl.Result, error) {
	t.Helper()
	return r.Reconcile(t.Context(), ctrl.Request{NamespacedName: types.NamespacedName{
		Namespace: Namespace, Name: name}})
}

// Settle lets controllers handle names in turn until nothing changes any more. After each error
// they are made anew, as after a restart. The test fails if that does not end.
func (w *World) Settle(t testing.TB, start func() []Reconciler, names ...string) {
	t.Helper()
	all := start()
	const many, soon = 60, time.Second
	for range many {
		before, more := w.writes, false
		for _, name := range names {
			for _, r := range all {
				result, err := Once(t, r, name)
				// A conflict is tried again soon, and is not a failure.
				more = more || err != nil || 0 < result.RequeueAfter && result.RequeueAfter < soon
				if err != nil {
					all = start()
					break
				}
			}
		}
		if !more && w.writes == before {
			return
		}
	}
	require.Fail(t, "it does not settle", "%d reads, %d writes", w.Calls.Reads, w.writes)
}

// Scheme has our types, those of pods and claims, and more. It has few, because a fake client goes
// through all of them at each request.
func Scheme(more ...func(*runtime.Scheme) error) *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range append(more, corev1.AddToScheme, v1alpha1.AddToScheme) {
		_ = add(s) // a missing type makes every test fail
	}
	return s
}

// PodOf makes a pod of a Job.
func PodOf(t testing.TB, c client.Client, job *batchv1.Job) *corev1.Pod {
	t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: job.Namespace,
		GenerateName: job.Name + "-", Labels: job.Spec.Template.Labels,
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "batch/v1", Kind: "Job",
			Name: job.Name, UID: job.UID, Controller: new(true)}}}}
	require.NoError(t, c.Create(t.Context(), pod))
	return pod
}

// EndJob lets a Job end, and a pod of it, which says something at its end.
func EndJob(t testing.TB, c client.Client, job *batchv1.Job, how batchv1.JobConditionType,
	says string) {
	t.Helper()
	pod := PodOf(t, c, job)
	pod.Status.Phase = corev1.PodSucceeded
	code := int32(0)
	if how == batchv1.JobFailed {
		pod.Status.Phase, code = corev1.PodFailed, 1
	}
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{
		Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Message: says}}}}
	require.NoError(t, c.Status().Update(t.Context(), pod))
	job.Status.Conditions = []batchv1.JobCondition{{Type: how, Status: corev1.ConditionTrue,
		LastTransitionTime: metav1.Now()}}
	require.NoError(t, c.Status().Update(t.Context(), job))
}

// Quantity is a size, such as 10Gi.
func Quantity(text string) *resource.Quantity { return new(resource.MustParse(text)) }

// Class is a storage class.
func Class(name string) *storagev1.StorageClass {
	return &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// DefaultClass is the storage class of claims that name none.
func DefaultClass() *storagev1.StorageClass {
	c := Class("default")
	c.Annotations = map[string]string{"storageclass.kubernetes.io/is-default-class": "true"}
	return c
}

// There reads an object, and says whether it exists.
func There(t testing.TB, c client.Reader, namespace, name string, o client.Object) bool {
	t.Helper()
	err := c.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, o)
	if apierrors.IsNotFound(err) {
		return false
	}
	require.NoError(t, err)
	return true
}

// Get reads an object into o. The object must exist.
func Get[T client.Object](t testing.TB, c client.Reader, namespace, name string, o T) T {
	t.Helper()
	require.True(t, There(t, c, namespace, name, o), "%T %s/%s", o, namespace, name)
	return o
}

// Refusing is an objects.Images: the reason why no image may be used. "": all may.
type Refusing string

// Refuse says so of every identity.
func (r *Refusing) Refuse(context.Context, *v1alpha1.VMIdentity) (reason, message string,
	err error) {
	if *r == "" {
		return "", "", nil
	}
	return string(*r), "the image has no signature", nil
}
