package objects

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
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
