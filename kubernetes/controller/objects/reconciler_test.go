package objects

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	batchv1 "k8s.io/api/batch/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

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
