package objects

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// TestFindsNoImpossibleName: there is no object with a name that no object can have. The client of
// the API server, which is not asked here, would find such a name an error.
func TestFindsNoImpossibleName(t *testing.T) {
	scheme := runtime.NewScheme()
	require.NoError(t, corev1.AddToScheme(scheme))
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Node"), meta.RESTScopeRoot)
	c := testtool.Must(client.New(&rest.Config{Host: "127.0.0.1:1"}, client.Options{Scheme: scheme,
		Mapper: mapper}))(t)
	for _, name := range []string{"", "a/b", "..", "50%"} {
		require.Error(t, c.Get(t.Context(), client.ObjectKey{Name: name}, &corev1.Node{}))
		node, err := Find[corev1.Node](t.Context(), c, "node", client.ObjectKey{Name: name})
		require.NoError(t, err, name)
		require.Nil(t, node)
	}
}

// classes is a reader of these storage classes.
type classes struct {
	client.Reader
	all []storagev1.StorageClass
}

func (c classes) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	list.(*storagev1.StorageClassList).Items = c.all
	return nil
}

// TestDefaultClass: of several default classes it is that which Kubernetes takes, in whatever order
// a cache has them.
func TestDefaultClass(t *testing.T) {
	of := func(name string, age time.Duration) storagev1.StorageClass {
		return storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name,
			CreationTimestamp: metav1.NewTime(time.Unix(1e9, 0).Add(-age)),
			Annotations:       map[string]string{annotationDefault: "true"}}}
	}
	all := []storagev1.StorageClass{of("c", 0), of("b", 0), of("a", time.Second)}
	for range all {
		all = append(all[1:], all[0])
		c := testtool.Must(Class(t.Context(), classes{all: all}, nil))(t)
		require.Equal(t, "b", c.Name)
	}
}

// TestTell: a changed condition is sent as an event, once for each reason, if the reason has one.
// The API server takes no longer note. It counts a part of a character as a whole one.
func TestTell(t *testing.T) {
	condition := func(kind, reason, message string) metav1.Condition {
		return metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: reason,
			Message: message}
	}
	before := []metav1.Condition{condition("Old", v1alpha1.ReasonFailed, "said already")}
	after := append(before, condition("A", v1alpha1.ReasonInvalid, strings.Repeat("x", 1019)+
		strings.Repeat("☃", 9)), // three bytes each
		condition("B", v1alpha1.ReasonInvalid, "of the same reason"),
		condition("C", v1alpha1.ReasonStarting, "goes on by itself"))
	long := "Warning Invalid " + strings.Repeat("x", 1019) + "..."
	normal := func(reason string) string { return corev1.EventTypeNormal }
	for name, c := range map[string]struct {
		kind func(string) string
		want []string
	}{
		"as everywhere": {EventType, []string{long}},
		"all": {normal, []string{strings.Replace(long, "Warning", "Normal", 1),
			"Normal Starting goes on by itself"}},
	} {
		sent := make(chan string, 10)
		with := func(c []metav1.Condition) *v1alpha1.VMIdentity {
			return &v1alpha1.VMIdentity{Status: v1alpha1.VMIdentityStatus{Conditions: c}}
		}
		Kit{Events: &events.FakeRecorder{Events: sent}}.Tell(with(before), with(after), c.kind)
		close(sent)
		var got []string
		for e := range sent {
			got = append(got, e)
		}
		require.Equal(t, c.want, got, name)
	}
}

// TestPageOfManyValues: a pod that answers in place of a daemon cannot make the controller take
// hundreds of megabytes.
func TestPageOfManyValues(t *testing.T) {
	luns := "null"
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, `{"luns":[%s]}`, luns)
	}))
	defer server.Close()
	address := strings.TrimPrefix(server.URL, "http://")
	got, err := ReadStatus(t.Context(), address)
	require.NoError(t, err)
	require.Len(t, got.LUNs, 1)
	luns += strings.Repeat(",{}", maxValues+1)
	_, err = ReadStatus(t.Context(), address)
	require.ErrorContains(t, err, "more than 16384 values")
	luns = strings.Repeat(" ", MaxPage)
	require.Error(t, testtool.Err(ReadStatus(t.Context(), address)))
}

// TestReconciler: a conflict is tried again soon, and is not reported. Other errors are.
func TestReconciler(t *testing.T) {
	conflict := apierrors.NewConflict(schema.GroupResource{}, "x", errors.New("somebody else"))
	other, given := errors.New("no"), reconcile.Result{RequeueAfter: time.Minute}
	for _, c := range []struct {
		err, want error
		after     time.Duration
	}{
		{nil, nil, time.Minute}, {conflict, nil, afterConflict}, {other, other, time.Minute},
	} {
		r := Reconciler(reconcile.Func(func(context.Context, reconcile.Request) (reconcile.Result,
			error) {
			return given, c.err
		}))
		result, err := r.Reconcile(t.Context(), reconcile.Request{})
		require.Equal(t, c.want, err)
		require.Equal(t, c.after, result.RequeueAfter)
	}
}

// TestWorking: a failed attempt is repeated at once, then less often, and within a minute for ever.
func TestWorking(t *testing.T) {
	b := working(3).RateLimiter
	vm, other := reconcile.Request{NamespacedName: types.NamespacedName{Name: "vm"}},
		reconcile.Request{}
	var wait time.Duration
	for range 100 {
		next := b.When(vm)
		require.GreaterOrEqual(t, next, wait)
		require.LessOrEqual(t, next, time.Minute)
		wait = next
	}
	require.Equal(t, time.Minute, wait)
	require.Less(t, b.When(other), time.Second)
	b.Forget(vm)
	require.Less(t, b.When(vm), time.Second)
}

// TestLeft: a clock that was wrong when a Job ended does not keep it for long.
func TestLeft(t *testing.T) {
	for ago, stays := range map[time.Duration]bool{
		0: true, 30 * time.Second: true, 2 * time.Minute: false,
		-30 * time.Second: true, -time.Hour: false, -10_000 * time.Hour: false,
	} {
		ended := batchv1.JobCondition{LastTransitionTime: metav1.NewTime(time.Now().Add(-ago))}
		left := Left(ended, time.Minute)
		require.Equal(t, stays, left > 0, ago)
		require.LessOrEqual(t, left, 2*time.Minute, ago)
	}
}

// TestArgumentsAreThoseThatWereGiven: an address may have what Kubernetes replaces in arguments.
func TestArgumentsAreThoseThatWereGiven(t *testing.T) {
	job := Command{Args: []string{"pull", "https://example.com/f?a=$(HOME)&b=$$"}}.Job(
		metav1.ObjectMeta{}, nil)
	require.Equal(t, []string{"pull", "https://example.com/f?a=$$(HOME)&b=$$$$"},
		job.Spec.Template.Spec.Containers[0].Args)
}
