package objects

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// TestAside: a pod that does not answer holds up nobody. Its answer is returned once, if it is not
// old by then, and only as that of the pod that was asked.
func TestAside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var answered, asked atomic.Int32
		a := &Aside[int]{Answered: func(types.NamespacedName) { answered.Add(1) }}
		hangs := make(chan struct{})
		id, wrong := types.NamespacedName{Namespace: "a", Name: "vm"}, errors.New("wrong")
		ask := func(pod types.UID) (int, bool, error) {
			return a.Ask(t.Context(), id, pod, func(context.Context) (int, error) {
				n := asked.Add(1)
				<-hangs
				return int(n), wrong
			})
		}
		for range 3 {
			_, known, _ := ask("1")
			require.False(t, known)
		}
		synctest.Wait()
		require.EqualValues(t, 1, asked.Load(), "one question at a time")
		hangs <- struct{}{}
		synctest.Wait()
		require.EqualValues(t, 1, answered.Load())
		said, known, err := ask("1")
		require.True(t, known)
		require.Equal(t, 1, said)
		require.Equal(t, wrong, err)

		_, known, _ = ask("1")
		require.False(t, known, "an answer counts once")
		hangs <- struct{}{}
		time.Sleep(freshFor)
		_, known, _ = ask("1")
		require.False(t, known, "an old answer does not count")

		_, known, _ = ask("2")
		require.False(t, known)
		hangs <- struct{}{}
		hangs <- struct{}{}
		synctest.Wait()
		_, known, _ = ask("2")
		require.True(t, known)
		_, known, _ = ask("1")
		require.False(t, known, "it is another pod")
		hangs <- struct{}{}
		synctest.Wait()
		a.Forget(id)
		_, known, _ = ask("1")
		require.False(t, known)
		hangs <- struct{}{}
		synctest.Wait()
	})
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
