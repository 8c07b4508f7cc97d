package admission

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/config"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// BenchmarkPolicies measures how long it takes to make a pod that asks for a disk, to make one that
// does not, and to change the first one, beside some VMIdentitySets in the namespace. server-ms/op
// is the CPU time of the API server for it.
//
//	go test -run '^$' -bench Policies -benchtime 100x ./kubernetes/integration/admission
func BenchmarkPolicies(b *testing.B) {
	p := plane.Get(b)
	install(b, p, config.Policies(server))
	for _, many := range []int{1, 100, 1000} {
		namespace := p.Namespace(b)
		var group errgroup.Group
		group.SetLimit(16)
		for n := range many {
			group.Go(func() error {
				set := &api.VMIdentitySet{Spec: api.DiskSpec{Image: repository + digest}}
				set.Namespace, set.Name = namespace, fmt.Sprintf("set-%d", n)
				return p.Client.Create(b.Context(), set)
			})
		}
		require.NoError(b, group.Wait())
		asks := aPod(namespace, fmt.Sprintf("set-%d", many-1))
		plain := aPod(namespace, "")
		plain.Annotations = nil
		var err error
		testtool.Within(b, patience, func() bool {
			var pod *corev1.Pod
			pod, err = dryRun(b.Context(), p, asks)
			return err == nil && len(pod.Spec.SchedulingGates) > 0
		}, "the pod is changed: %v", func() any { return err })
		made := asks.DeepCopy()
		made.Name = "made"
		require.NoError(b, p.Client.Create(b.Context(), made))
		for name, do := range map[string]func() error{
			"asks":  func() error { _, err := dryRun(b.Context(), p, asks); return err },
			"plain": func() error { _, err := dryRun(b.Context(), p, plain); return err },
			"changes": func() error {
				after := made.DeepCopy()
				after.Labels["a"] = "b"
				return p.Client.Patch(b.Context(), after, client.MergeFrom(made), client.DryRunAll)
			},
		} {
			b.Run(fmt.Sprintf("%s/sets=%d", name, many), func(b *testing.B) {
				before := serverCPU(b, p)
				for b.Loop() {
					require.NoError(b, do())
				}
				b.ReportMetric((serverCPU(b, p)-before)/float64(b.N), "server-ms/op")
			})
		}
		require.NoError(b, p.Client.Delete(b.Context(), made, client.GracePeriodSeconds(0)))
		require.NoError(b, p.Client.DeleteAllOf(b.Context(), &api.VMIdentitySet{},
			client.InNamespace(namespace)))
	}
}

// serverCPU is the CPU time of the API server so far, in milliseconds. The machine may be busy with
// other things.
func serverCPU(b *testing.B, p *plane.Plane) float64 {
	b.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(b, err)
	for _, file := range all {
		line, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(line), "kube-apiserver\x00") ||
			!strings.Contains(string(line), p.Dir) {
			continue // the process may have ended
		}
		tasks, err := filepath.Glob(filepath.Join(filepath.Dir(file), "task/*/schedstat"))
		require.NoError(b, err)
		var sum float64
		for _, task := range tasks {
			text, err := os.ReadFile(task)
			if err != nil {
				continue // a thread that has ended
			}
			ns, err := strconv.ParseFloat(strings.Fields(string(text))[0], 64)
			require.NoError(b, err)
			sum += ns
		}
		return sum / 1e6
	}
	b.Fatal("no API server")
	return 0
}
