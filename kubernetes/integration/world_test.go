package kubernetes

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/controller"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// world is a namespace that a controller works in, with the role of the manifest.
type world struct {
	t  *testing.T
	p  *plane.Plane
	ns string
	c  *running
}

func newWorld(t *testing.T, args ...string) *world {
	t.Helper()
	p := plane.Get(t)
	install(t, p)
	w := &world{t: t, p: p, ns: p.Namespace(t)}
	w.c = w.controller(p.ServiceAccount(t, systemNamespace, account), args...)
	return w
}

// controller starts a controller that works in the namespace, without leader election: it would
// wait for the replicas of another test.
func (w *world) controller(config *rest.Config, args ...string) *running {
	w.t.Helper()
	c := runController(w.t, controllerBinary(w.t), config, append(args, "--leader-elect=false",
		"--namespace="+w.ns)...)
	c.ready()
	return c
}

// grant gives the controller's account rights that the chart gives it only with a setting.
func grant(t *testing.T, p *plane.Plane, s controllertest.Settings) {
	t.Helper()
	role := controllertest.RoleOf(t, s)
	p.Grant(t, strings.ToLower(t.Name()), systemNamespace, account,
		slices.Concat(role.Rules, role.Cluster)...)
}

func (w *world) apply(text string) {
	w.t.Helper()
	for _, o := range testtool.Must(plane.Decode(strings.NewReader(text)))(w.t) {
		require.NoError(w.t, w.p.Apply(context.Background(), w.ns, o))
	}
}

// kubectl runs kubectl in the namespace. It returns the output of failures, too.
func (w *world) kubectl(args ...string) string {
	out, _ := w.p.TryKubectl(nil, append([]string{"-n", w.ns}, args...)...)
	return out
}

// until waits for the answer to a question to kubectl.
func (w *world) until(want string, args ...string) {
	w.t.Helper()
	var last string
	testtool.Within(w.t, timeout, func() bool {
		last = w.kubectl(args...)
		return strings.Contains(last, want)
	}, "kubectl %s: want %q, is %q", strings.Join(args, " "), want, func() any { return last })
}

// reasons waits until a condition of a disk has a reason.
func (w *world) reasons(disk, reason string) {
	w.t.Helper()
	w.until(" "+reason+" ", "get", "vmid", disk, "-o",
		"jsonpath={range .status.conditions[*]} {.reason} {end}")
}

// machine makes a pod of VMIdentitySet `set` for a disk.
func (w *world) machine(name, disk string) error { return w.machineOf("set", name, disk) }

// machineOf makes a pod of a set for a disk, as admission leaves it. While the API server is down,
// it tries again. Several goroutines may call it.
func (w *world) machineOf(set, name, disk string) error {
	pod := gatedPod(w.ns, name, set, disk)
	var last error
	err := wait.PollUntilContextTimeout(w.t.Context(), 100*time.Millisecond, timeout, true,
		func(ctx context.Context) (bool, error) {
			// A request that seemed to fail may have succeeded.
			last = client.IgnoreAlreadyExists(w.p.Client.Create(ctx, pod.DeepCopy()))
			return last == nil, nil
		})
	return errors.Join(err, last)
}

func (w *world) remove(o client.Object, name string) {
	w.t.Helper()
	o.SetNamespace(w.ns)
	o.SetName(name)
	require.NoError(w.t, w.p.Client.Delete(w.t.Context(), o))
}

// free returns the names of the pods in the namespace that are no longer held.
func (w *world) free() map[string]bool {
	w.t.Helper()
	var pods corev1.PodList
	require.NoError(w.t, w.p.Client.List(w.t.Context(), &pods, client.InNamespace(w.ns)))
	free := map[string]bool{}
	for _, pod := range pods.Items {
		if len(pod.Spec.SchedulingGates) == 0 {
			free[pod.Name] = true
		}
	}
	return free
}

// starts waits until a pod is no longer held.
func (w *world) starts(name string) {
	w.t.Helper()
	testtool.Within(w.t, timeout, func() bool { return w.free()[name] }, "pod %s starts", name)
}

// disks returns a line for each object of the disks. The line shows whether the object was made
// anew, or is being deleted.
func (w *world) disks() string {
	w.t.Helper()
	return w.p.Kubectl(w.t, "-n", w.ns, "get", "vmid,pvc,secret", "-o", `jsonpath={range .items[*]}`+
		`{.kind} {.metadata.name} {.metadata.uid} {.metadata.deletionTimestamp}{"\n"}{end}`)
}

func TestMain(m *testing.M) { plane.Main(m) }

// clientOf makes a client that knows the types of the controllers.
func clientOf(config *rest.Config) (client.Client, error) {
	scheme, err := controller.Scheme()
	if err != nil {
		return nil, err
	}
	return client.New(config, client.Options{Scheme: scheme})
}
