package kubernetes

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/admission"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// scale is the number of identities and of pods. KUBEVIRT_DISK_SCALE=IDENTITIES,PODS changes it.
const scale = "5000,1000"

// setName is the set of all identities.
const setName = "many"

// BenchmarkScale makes identities, and pods for some of them, as fast as the API server takes them,
// and waits until every identity is ready and every pod has lost its gate. It reports the seconds,
// the controller's requests per identity, its requests in 10 seconds afterwards, and its peak
// memory. The controller is a process with exactly its role.
//
//	go test -run '^$' -bench Scale -benchtime 1x ./kubernetes/integration
func BenchmarkScale(b *testing.B) {
	identities, pods := scaleOf(b)
	p := plane.Get(b)
	install(b, p)
	for range b.N {
		c := startCounted(b, p)
		ns := p.Namespace(b)
		ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
		defer cancel()
		before := c.requests()
		began := time.Now()
		makeMany(b, ctx, p, ns, identities, pods)
		made := time.Since(began)
		waitForAll(b, ctx, p, ns, identities, pods)
		took := time.Since(began)
		time.Sleep(5 * time.Second) // late requests count, too
		used := c.requests() - before
		time.Sleep(10 * time.Second)
		b.ReportMetric(made.Seconds(), "s-to-make")
		b.ReportMetric(took.Seconds(), "s-to-reconcile")
		b.ReportMetric(float64(used)/float64(identities), "requests/identity")
		b.ReportMetric(float64(c.requests()-before-used), "requests-when-idle")
		b.ReportMetric(float64(c.peak())/1024, "MiB-peak")
		b.ReportMetric(0, "ns/op")
		require.Equal(b, 0, c.terminate())
	}
}

func scaleOf(b *testing.B) (identities, pods int) {
	b.Helper()
	text := os.Getenv("KUBEVIRT_DISK_SCALE")
	if text == "" {
		text = scale
	}
	_, err := fmt.Sscanf(text, "%d,%d", &identities, &pods)
	require.NoError(b, err, "KUBEVIRT_DISK_SCALE is IDENTITIES,PODS")
	require.LessOrEqual(b, pods, identities)
	return identities, pods
}

// makeMany makes a set, its identities, and pods as admission leaves them.
func makeMany(b *testing.B, ctx context.Context, p *plane.Plane, ns string, identities, pods int) {
	b.Helper()
	spec := v1alpha1.DiskSpec{Image: testImage, Type: v1alpha1.PersistentVolume}
	set := &v1alpha1.VMIdentitySet{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: setName}, Spec: spec}
	require.NoError(b, p.Client.Create(ctx, set))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(32)
	for i := range max(identities, pods) {
		name := fmt.Sprintf("vm-%d", i)
		group.Go(func() error {
			return client.IgnoreAlreadyExists(p.Client.Create(ctx, &v1alpha1.VMIdentity{
				ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name,
					Labels: map[string]string{v1alpha1.LabelSet: set.Name}},
				Spec: v1alpha1.VMIdentitySpec{DiskSpec: spec, SetName: set.Name}}))
		})
		if i < pods {
			group.Go(func() error {
				return p.Client.Create(ctx, gatedPod(ns, name, set.Name, name))
			})
		}
	}
	require.NoError(b, group.Wait())
}

// gatedPod is a pod as admission leaves it.
func gatedPod(ns, name, set, disk string) *corev1.Pod {
	pod := plane.Pod(ns, name, map[string]string{v1alpha1.AnnotationSet: set,
		v1alpha1.AnnotationName: disk})
	if err := admission.Pod(pod, "registry.example.com/disk:1", []admission.Wanted{{
		Disk: admission.Disks(pod)[0], Set: &v1alpha1.VMIdentitySet{
			ObjectMeta: metav1.ObjectMeta{Name: set},
			Spec:       v1alpha1.DiskSpec{Image: testImage}}}}); err != nil {
		panic(err) // the pod of this test is wrong
	}
	return pod
}

// waitForAll asks rarely. It asks for lists only when the set reports that its identities are
// ready, because a list of thousands is work for the API server.
func waitForAll(b *testing.B, ctx context.Context, p *plane.Plane, ns string,
	identities, pods int) {
	b.Helper()
	require.NoError(b, wait.PollUntilContextCancel(ctx, time.Second, true,
		func(ctx context.Context) (bool, error) {
			set := &v1alpha1.VMIdentitySet{}
			key := client.ObjectKey{Namespace: ns, Name: setName}
			if err := p.Client.Get(ctx, key, set); err != nil {
				return false, err
			}
			if int(set.Status.ReadyIdentities) < identities {
				return false, nil
			}
			list := &corev1.PodList{}
			if err := p.Client.List(ctx, list, client.InNamespace(ns)); err != nil {
				return false, err
			}
			free := 0
			for _, pod := range list.Items {
				if len(pod.Spec.SchedulingGates) == 0 {
					free++
				}
			}
			if free < pods {
				return false, nil
			}
			ids := &v1alpha1.VMIdentityList{}
			if err := p.Client.List(ctx, ids, client.InNamespace(ns)); err != nil {
				return false, err
			}
			ready := 0
			for _, id := range ids.Items {
				if id.Status.Ready {
					ready++
				}
			}
			return ready == identities, nil
		}))
}

// counted is a controller whose requests to the API server are counted. It does not elect a leader,
// which takes a request every two seconds.
type counted struct {
	*running
	metrics string
}

func startCounted(b *testing.B, p *plane.Plane) *counted {
	b.Helper()
	listen := plane.FreeAddress(b)
	c := &counted{metrics: "http://" + listen + "/metrics"}
	c.running = runController(b, controllerBinary(b), p.ServiceAccount(b, systemNamespace, account),
		"--leader-elect=false", "--metrics-open", "--metrics-listen="+listen)
	c.ready()
	return c
}

// requests returns how many requests the controller has made.
func (c *counted) requests() (n int) {
	c.t.Helper()
	answer := testtool.Must(http.Get(c.metrics))(c.t)
	defer answer.Body.Close()
	for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), "rest_client_requests_total{") {
			value := lines.Text()[strings.LastIndex(lines.Text(), " ")+1:]
			n += int(testtool.Must(strconv.ParseFloat(value, 64))(c.t))
		}
	}
	return n
}

var highWater = regexp.MustCompile(`VmHWM:\s+(\d+) kB`)

// peak returns the controller's peak memory, in KiB.
func (c *counted) peak() int {
	c.t.Helper()
	status := testtool.Must(os.ReadFile(fmt.Sprintf("/proc/%d/status", c.cmd.Process.Pid)))(c.t)
	found := highWater.FindSubmatch(status)
	require.NotNil(c.t, found)
	return testtool.Must(strconv.Atoi(string(found[1])))(c.t)
}
