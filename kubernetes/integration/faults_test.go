package kubernetes

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// TestServerRestarts kills the API server while the controller makes disks. The controller
// continues its work, makes nothing twice, and sees later changes.
func TestServerRestarts(t *testing.T) {
	w := newWorld(t)
	w.apply(set("set", ""))
	const few, all = 4, 16
	name := func(n int) string { return fmt.Sprintf("vm-%d", n) }
	for n := range few {
		require.NoError(t, w.machine(name(n), name(n)))
	}
	for n := range few {
		w.starts(name(n))
	}
	first := w.disks()

	var group errgroup.Group
	making := make(chan struct{})
	for n := few; n < all; n++ {
		group.Go(func() error {
			err := w.machine(name(n), name(n))
			if n == few {
				close(making)
			}
			return err
		})
	}
	<-making
	w.p.RestartServer(t)
	require.NoError(t, group.Wait())
	for n := range all {
		w.starts(name(n))
	}
	w.remove(&corev1.Pod{}, name(0))
	require.NoError(t, w.machine("next", name(0)))
	w.starts("next")

	is := w.disks()
	for line := range strings.Lines(first) {
		require.Contains(t, is, line, "it was there before")
	}
	require.Equal(t, 3*all, strings.Count(is, "\n"), "each disk has an identity, a claim and a "+
		"secret:\n%s", is)
	require.NotContains(t, w.kubectl("get", "events"), "Foreign",
		"what the controller made is its own")
	select {
	case <-w.c.done:
		t.Fatal("the controller has ended")
	default:
	}
}

// TestWatchLost cuts the controller's connections. It sees afterwards what happened meanwhile: pods
// that come and go, a pod that is replaced by another one of its name, a disk that is deleted, and
// a set that is replaced by another one of its name. The API server restarts meanwhile, so that it
// has no history: the controller sees only the result, as if the objects had changed.
func TestWatchLost(t *testing.T) {
	p := plane.Get(t)
	install(t, p)
	w := &world{t: t, p: p, ns: p.Namespace(t)}
	config := rest.CopyConfig(p.ServiceAccount(t, systemNamespace, account))
	wire := newWire(t, strings.TrimPrefix(config.Host, "https://"))
	config.Host = "https://" + wire.address()
	w.c = w.controller(config)
	w.apply(set("set", ""))
	for pod, disk := range map[string]string{"a": "shared", "replaced": "its-own", "idle": "gone"} {
		require.NoError(t, w.machine(pod, disk))
		w.starts(pod)
	}
	require.NoError(t, w.machine("b", "shared"))
	w.until("pod b waits", "get", "vmid", "shared", "-o",
		"jsonpath={.status.conditions[*].message}")
	// A disk from one image, and a set with another one.
	w.apply(set("renewed", ""))
	require.NoError(t, w.machineOf("renewed", "first", "kept"))
	w.starts("first")
	require.NoError(t, w.machineOf("renewed", "second", "kept"))
	w.remove(&v1alpha1.VMIdentitySet{}, "renewed")
	w.apply(strings.Replace(set("renewed", ""), "/fedora@", "/other@", 1))
	w.remove(&corev1.Pod{}, "first")
	w.reasons("kept", "ImageDiffers")

	p.ServeWebhook(t, systemNamespace, account, "kubevirt.io:disk", w.ns) // of another replica
	wire.cut()
	w.remove(&v1alpha1.VMIdentitySet{}, "renewed")
	w.apply(set("renewed", ""))
	w.remove(&corev1.Pod{}, "a")
	w.remove(&corev1.Pod{}, "idle")
	w.remove(&v1alpha1.VMIdentity{}, "gone")
	w.remove(&corev1.Pod{}, "replaced")
	require.NoError(t, w.machine("replaced", "its-own"))
	require.NoError(t, w.machine("new", "new"))
	require.Empty(t, w.free(), "the controller hears of nothing")
	p.RestartServer(t)
	wire.mend()

	w.starts("b")
	w.starts("replaced")
	w.starts("new")
	w.starts("second")
	w.until("ready: 1", "get", "vmidentityset", "renewed", "-o",
		"jsonpath=ready: {.status.readyIdentities}")
	for _, what := range []string{"vmid/gone", "pvc/vmid-gone", "secret/vmid-gone"} {
		w.until("NotFound", "get", what)
	}
}

// TestTwoLeadersWithOneUUID: only one machine at a time starts in a set with a fixed firmwareUUID,
// although two controllers that both lead see all machines at once.
func TestTwoLeadersWithOneUUID(t *testing.T) {
	w := newWorld(t)
	w.controller(w.p.ServiceAccount(t, systemNamespace, account))
	w.apply(set("set", `, "firmwareUUID": "1b4d298f-6151-40b0-a1d4-269fc41d48f0"`))
	const machines = 6
	var group errgroup.Group
	for n := range machines {
		group.Go(func() error { name := fmt.Sprintf("vm-%d", n); return w.machine(name, name) })
	}
	require.NoError(t, group.Wait())
	waiting := func() (n int) {
		var ids v1alpha1.VMIdentityList
		require.NoError(t, w.p.Client.List(t.Context(), &ids, client.InNamespace(w.ns)))
		for _, id := range ids.Items {
			for _, c := range id.Status.Conditions {
				if c.Reason == v1alpha1.ReasonUUIDInUse {
					n++
				}
			}
		}
		return n
	}
	for left := machines; left > 0; left-- {
		var free map[string]bool
		testtool.Within(t, timeout, func() bool {
			free = w.free()
			require.LessOrEqual(t, len(free), 1, "%v have one UUID", free)
			return len(free) == 1 && waiting() == left-1
		}, "of %d machines one starts: %v, and the others wait: %d", left,
			func() any { return free }, func() any { return waiting() })
		for name := range free {
			w.remove(&corev1.Pod{}, name)
		}
	}
}

// wire carries connections to an address, and can be cut.
type wire struct {
	listener net.Listener
	to       string

	mu    sync.Mutex
	isCut bool                  // guarded by mu
	conns map[net.Conn]struct{} // guarded by mu; open ones
}

func newWire(t *testing.T, to string) *wire {
	t.Helper()
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	w := &wire{listener: l, to: to, conns: map[net.Conn]struct{}{}}
	t.Cleanup(func() {
		l.Close()
		w.cut()
	})
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return // the listener is closed
			}
			go w.carry(in)
		}
	}()
	return w
}

func (w *wire) address() string { return w.listener.Addr().String() }

// cut ends all connections, and accepts no new ones.
func (w *wire) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isCut = true
	for c := range w.conns {
		c.Close()
	}
}

func (w *wire) mend() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isCut = false
}

func (w *wire) carry(in net.Conn) {
	defer in.Close()
	out, err := net.Dial("tcp", w.to)
	if err != nil {
		return
	}
	defer out.Close()
	if !w.add(in, out) {
		return
	}
	go func() {
		_, _ = io.Copy(out, in) // either end may be closed
		out.Close()
	}()
	_, _ = io.Copy(in, out)
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.conns, in)
	delete(w.conns, out)
}

// add reports whether the connections may go on.
func (w *wire) add(conns ...net.Conn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range conns {
		if !w.isCut {
			w.conns[c] = struct{}{}
		}
	}
	return !w.isCut
}

// TestWakeUps: each event that a pod waits for lets it start, and a set's status follows its disks,
// even if the controller starts only afterwards.
func TestWakeUps(t *testing.T) {
	w := newWorld(t)
	one := set("set", `, "size": "1Gi", "firmwareUUID": "1b4d298f-6151-40b0-a1d4-269fc41d48f0"`)
	w.apply(one)
	require.NoError(t, w.machine("a", "shared"))
	w.starts("a")
	require.NoError(t, w.machine("b", "shared"))
	require.NoError(t, w.machine("c", "other"))
	w.until("pod b waits", "get", "vmid", "shared", "-o",
		"jsonpath={.status.conditions[*].message}")
	w.reasons("other", "UUIDInUse")
	w.until("2 of 2", "get", "vmidentityset", "set", "-o",
		"jsonpath={.status.readyIdentities} of {.status.identities}")

	w.remove(&v1alpha1.VMIdentitySet{}, "set") // a set is deleted
	w.reasons("other", "SetMissing")
	w.remove(&corev1.Pod{}, "a") // a pod ends
	w.reasons("shared", "SetMissing")
	w.remove(&corev1.Pod{}, "c")
	w.reasons("other", "NotInUse")
	w.apply(one) // a set appears
	w.starts("b")
	require.NoError(t, w.machine("d", "other"))
	w.reasons("other", "UUIDInUse")
	w.remove(&corev1.Pod{}, "b") // the UUID is free
	w.starts("d")
	w.apply(strings.Replace(one, "1Gi", "2Gi", 1)) // a set has another spec
	w.until("2Gi", "get", "vmid", "other", "-o", "jsonpath={.spec.size}")
	w.remove(&v1alpha1.VMIdentity{}, "shared") // a disk goes
	w.until("1 of 1", "get", "vmidentityset", "set", "-o",
		"jsonpath={.status.readyIdentities} of {.status.identities}")

	require.Zero(t, w.c.terminate())
	w.p.ServeWebhook(t, systemNamespace, account, "kubevirt.io:disk", w.ns) // of another replica
	require.NoError(t, w.machine("e", "other"))
	w.remove(&corev1.Pod{}, "d")
	w.apply(strings.Replace(one, "1Gi", "3Gi", 1))
	w.c = w.controller(w.p.ServiceAccount(t, systemNamespace, account))
	w.starts("e")
	w.until("3Gi", "get", "vmid", "other", "-o", "jsonpath={.spec.size}")
}
