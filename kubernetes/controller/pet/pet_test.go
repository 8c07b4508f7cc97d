package pet

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
)

const image = "registry.example.com/fedora@sha256:" +
	"a8dd75ecffd4cdd96072d60c2237b448e0c8b2bc94d57f10fdbc8c481d9005b8"

var name = client.ObjectKey{Namespace: "default", Name: "fedora"}

var scheme = controllertest.Scheme(appsv1.AddToScheme)

// world is an API server without admission, and the reconciler.
type world struct {
	t *testing.T
	client.WithWatch
	calls  *controllertest.Calls
	r      *Reconciler
	events chan string
}

func newWorld(t *testing.T, calls *controllertest.Calls, all ...client.Object) *world {
	t.Helper()
	w := &world{t: t, calls: calls, events: make(chan string, 100)}
	w.WithWatch = fake.NewClientBuilder().WithScheme(scheme).WithObjects(all...).
		WithStatusSubresource(&v1alpha1.VMPet{}, &appsv1.StatefulSet{}, &v1alpha1.VMIdentity{}).
		Build()
	role := controllertest.RoleOf(t, controllertest.Settings{Pets: true})
	w.r = &Reconciler{objects.Kit{Client: role.Cache(calls.Client(w.WithWatch)),
		Events: &events.FakeRecorder{Events: w.events}}}
	return w
}

func newPet(template string) *v1alpha1.VMPet {
	return &v1alpha1.VMPet{
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name, UID: "1",
			Generation: 1},
		Spec: v1alpha1.VMPetSpec{
			Disk:     v1alpha1.DiskSpec{Image: image, Type: v1alpha1.PersistentVolume},
			Template: runtime.RawExtension{Raw: []byte(template)}},
	}
}

const template = `{"spec":{"terminationGracePeriodSeconds":3600,
	"containers":[{"name":"vm","image":"` + image + `","ports":[{"containerPort":8080}]}]}}`

func (w *world) reconcile() error {
	_, err := w.r.Reconcile(w.t.Context(), ctrl.Request{NamespacedName: name})
	return err
}

func (w *world) converge() ctrl.Result {
	w.t.Helper()
	return w.calls.Settle(w.t, w.r, nil, name)
}

func (w *world) get(o client.Object) {
	w.t.Helper()
	require.NoError(w.t, w.Get(w.t.Context(), name, o))
}

func (w *world) ready() *metav1.Condition {
	w.t.Helper()
	var pet v1alpha1.VMPet
	w.get(&pet)
	c := meta.FindStatusCondition(pet.Status.Conditions, v1alpha1.ConditionReady)
	require.NotNil(w.t, c)
	require.Equal(w.t, pet.Generation, c.ObservedGeneration)
	return c
}

func (w *world) change(what func(*v1alpha1.VMPet)) {
	w.t.Helper()
	var pet v1alpha1.VMPet
	w.get(&pet)
	what(&pet)
	pet.Generation++
	require.NoError(w.t, w.Update(w.t.Context(), &pet))
}

func TestPet(t *testing.T) {
	controllertest.EachFault(t, func(t *testing.T, calls *controllertest.Calls) {
		w := newWorld(t, calls, newPet(template))
		w.converge()
		var set v1alpha1.VMIdentitySet
		w.get(&set)
		require.Equal(t, image, set.Spec.Image)
		require.Equal(t, "VMPet", set.OwnerReferences[0].Kind)
		var pods appsv1.StatefulSet
		w.get(&pods)
		require.Equal(t, "VMPet", pods.OwnerReferences[0].Kind)
		require.EqualValues(t, 1, *pods.Spec.Replicas)
		require.Equal(t, pods.Spec.Selector.MatchLabels, pods.Spec.Template.Labels)
		require.Equal(t, map[string]string{v1alpha1.AnnotationSet: name.Name,
			v1alpha1.AnnotationName: name.Name}, pods.Spec.Template.Annotations)
		require.EqualValues(t, 3600, *pods.Spec.Template.Spec.TerminationGracePeriodSeconds)
		require.Equal(t, v1alpha1.ReasonStarting, w.ready().Reason)

		// Nothing is written while nothing changes.
		before := calls.Writes
		w.converge()
		require.Equal(t, before, calls.Writes)

		w.change(func(p *v1alpha1.VMPet) { p.Spec.Running = new(bool) })
		w.converge()
		w.get(&pods)
		require.Zero(t, *pods.Spec.Replicas)
		require.Equal(t, v1alpha1.ReasonStopped, w.ready().Reason)
	})
}

func TestPetIsReadyWithItsPod(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), newPet(template))
	w.converge()
	identity := &v1alpha1.VMIdentity{
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
	require.NoError(t, w.Create(t.Context(), identity))
	identity.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady,
		Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonQuotaExceeded, Message: "no quota",
		LastTransitionTime: metav1.Now()}}
	require.NoError(t, w.Status().Update(t.Context(), identity))
	var pods appsv1.StatefulSet
	w.get(&pods)
	pods.Status.Replicas = 1
	require.NoError(t, w.Status().Update(t.Context(), &pods))
	w.converge()
	require.Equal(t, "pod fedora-0 waits for its disk: no quota", w.ready().Message)

	pods.Status.ReadyReplicas = 1
	require.NoError(t, w.Status().Update(t.Context(), &pods))
	w.converge()
	require.Equal(t, metav1.ConditionTrue, w.ready().Status)

	// If somebody scales the StatefulSet, it is scaled back.
	w.get(&pods)
	pods.Spec.Replicas = new(int32)
	require.NoError(t, w.Update(t.Context(), &pods))
	w.converge()
	w.get(&pods)
	require.EqualValues(t, 1, *pods.Spec.Replicas)

	w.change(func(p *v1alpha1.VMPet) { p.Spec.Running = new(bool) })
	w.converge()
	require.Equal(t, v1alpha1.ReasonStopping, w.ready().Reason)
}

func TestPetTemplateIsRefused(t *testing.T) {
	for template, want := range map[string]string{
		`3`:    "spec.template: want metadata and spec",
		`null`: "spec.template: want metadata and spec",
		`{"metadata":{"annotations":{"disk.kubevirt.io/identity-set":"x"}}}`: `spec.template.` +
			`metadata.annotations["disk.kubevirt.io/identity-set"]: it is "x": leave it out`,
		`{"metadata":{"labels":3}}`: `spec.template.metadata.labels["disk.kubevirt.io/pet"]`,
	} {
		w := newWorld(t, new(controllertest.Calls), newPet(template))
		w.converge()
		require.Equal(t, v1alpha1.ReasonInvalid, w.ready().Reason)
		require.Contains(t, w.ready().Message, want)
		require.Contains(t, <-w.events, "Warning Invalid")
		var set v1alpha1.VMIdentitySet
		require.True(t, apierrors.IsNotFound(w.Get(t.Context(), name, &set)))
	}
}

func TestPetsAreTurnedOff(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), newPet(template))
	w.r.Options.Without = []string{objects.Pets}
	w.converge()
	require.Equal(t, v1alpha1.ReasonInvalid, w.ready().Reason)
	require.Contains(t, w.ready().Message, "pets are turned off")
	require.True(t, apierrors.IsNotFound(w.Get(t.Context(), name, &v1alpha1.VMIdentitySet{})))
	require.Contains(t, <-w.events, "Warning Invalid")
	w.r.Options.Without = nil
	w.converge()
	require.Equal(t, v1alpha1.ReasonStarting, w.ready().Reason)
}

// TestPetLeavesOthersAlone: if an object has the pet's name but does not belong to the pet, the
// controller neither changes it nor takes it over.
func TestPetLeavesOthersAlone(t *testing.T) {
	set := &v1alpha1.VMIdentitySet{
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
	w := newWorld(t, new(controllertest.Calls), newPet(template), set)
	require.NotZero(t, w.converge().RequeueAfter, "nobody tells that it has gone")
	require.Equal(t, v1alpha1.ReasonFailed, w.ready().Reason)
	require.Contains(t, w.ready().Message, "there is a VMIdentitySet fedora already")
	w.get(set)
	require.Empty(t, set.Spec.Image)

	former := newPet(template)
	former.UID = "0"
	set.OwnerReferences = owner(former)
	require.NoError(t, w.Update(t.Context(), set))
	w.converge()
	require.Contains(t, w.ready().Message, "to a deleted pet of this name")
	require.NoError(t, w.Delete(t.Context(), set))
	w.converge()
	require.Equal(t, v1alpha1.ReasonStarting, w.ready().Reason)
}

// TestPetSaysWhatTheServerRefuses: if only a change of the pet can help, there is no other try.
func TestPetSaysWhatTheServerRefuses(t *testing.T) {
	kind := schema.GroupKind{Group: "apps", Kind: "StatefulSet"}
	refused := apierrors.NewInvalid(kind, name.Name, nil)
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "statefulsets"}, name.Name,
		fmt.Errorf("exceeded quota"))
	for reason, err := range map[string]error{v1alpha1.ReasonInvalid: refused,
		v1alpha1.ReasonFailed: forbidden} {
		// Three reads, the write of the set, and then that of the StatefulSet.
		w := newWorld(t, &controllertest.Calls{Fail: 5, Err: err}, newPet(template))
		again := w.reconcile()
		require.Equal(t, reason == v1alpha1.ReasonFailed, again != nil)
		require.Equal(t, reason, w.ready().Reason)
		require.Contains(t, w.ready().Message, "the StatefulSet")
	}
}
