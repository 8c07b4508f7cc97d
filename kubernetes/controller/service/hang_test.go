package service

import (
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
)

// TestPageThatHangs: while the server of a disk does not answer, Reconcile returns at once, so that
// other disks are handed over and removed. Nothing is removed meanwhile, and the work goes on when
// the answer comes.
func TestPageThatHangs(t *testing.T) {
	for what, c := range map[string]struct {
		begin func(*world)
		done  func(*world) bool
	}{
		"handover": {
			func(w *world) { w.annotate(v1alpha1.AnnotationHandoverTo, there) },
			func(w *world) bool { return w.identity().Status.Handover == "open "+there },
		},
		"removal": {
			func(w *world) { require.NoError(t, w.Delete(t.Context(), w.identity())) },
			func(w *world) bool {
				return !controllertest.There(t, w, made.Namespace, made.Name,
					&appsv1.Deployment{})
			},
		},
	} {
		t.Run(what, func(t *testing.T) {
			w := newWorld(t, new(controllertest.Calls), nil)
			w.converge()
			hangs := make(chan struct{})
			answer := sync.OnceFunc(func() { close(hangs) })
			daemon := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http",
				Host: w.r.Pages(nil)})
			page := httptest.NewServer(http.HandlerFunc(func(res http.ResponseWriter,
				req *http.Request) {
				<-hangs
				daemon.ServeHTTP(res, req)
			}))
			defer page.Close()
			defer answer()
			answered := make(chan types.NamespacedName, 10)
			w.r.aside.Answered = func(id types.NamespacedName) { answered <- id }
			w.r.Pages = func(*corev1.Pod) string { return page.Listener.Addr().String() }
			c.begin(w)
			for range 4 {
				_, err := w.reconcile()
				require.NoError(t, err)
			}
			require.False(t, c.done(w))
			require.Empty(t, answered)
			answer()
			require.Equal(t, types.NamespacedName(name), <-answered)
			_, err := w.reconcile()
			require.NoError(t, err)
			require.True(t, c.done(w))
		})
	}
}

// TestServerIsNotReached: a disk whose server does not say who uses it stays, and its condition
// says what people can do. The server is asked again after a while, and not at once: nothing fails,
// although each answer makes a request.
func TestServerIsNotReached(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), nil)
	w.converge()
	gone := httptest.NewServer(http.NotFoundHandler())
	w.r.Pages = func(*corev1.Pod) string { return gone.Listener.Addr().String() }
	gone.Close()
	require.NoError(t, w.Delete(t.Context(), w.identity()))
	answered := make(chan types.NamespacedName, 1)
	w.r.aside.Answered = func(id types.NamespacedName) { answered <- id }
	for range 2 {
		_, err := w.reconcile()
		require.NoError(t, err)
		<-answered
		result, err := w.reconcile()
		require.NoError(t, err)
		require.Equal(t, 10*pollInterval, result.RequeueAfter)
		is := w.condition(v1alpha1.ConditionServed)
		require.Equal(t, metav1.ConditionFalse, is.Status)
		require.Equal(t, v1alpha1.ReasonUnknown, is.Reason)
		require.Contains(t, is.Message, "pod "+made.Name+" does not say who is logged in")
		require.Contains(t, is.Message, "switch off the node node-1 if it is lost")
	}
	require.NoError(t, w.Get(t.Context(), made, &appsv1.Deployment{}))
}

// TestServerResetsConnections: nothing is written while the server of a disk that is handed over
// still does not answer, because each change of the status makes another request.
func TestServerResetsConnections(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls), nil)
	w.converge()
	page := httptest.NewServer(http.HandlerFunc(func(res http.ResponseWriter, _ *http.Request) {
		c, _, err := http.NewResponseController(res).Hijack()
		if tcp, ok := c.(*net.TCPConn); err == nil && ok {
			_ = tcp.SetLinger(0) // so that it is reset
			tcp.Close()
		}
	}))
	defer page.Close()
	w.r.Pages = func(*corev1.Pod) string { return page.Listener.Addr().String() }
	w.annotate(v1alpha1.AnnotationHandoverTo, there)
	said := func() string {
		result, err := w.reconcile()
		require.NoError(t, err)
		require.NotZero(t, result.RequeueAfter)
		return w.condition(v1alpha1.ConditionHandedOver).Message
	}
	first := said()
	require.Contains(t, first, "does not answer")
	require.Equal(t, first, said())
}
