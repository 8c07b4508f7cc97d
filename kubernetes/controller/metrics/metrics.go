// Package metrics shows the state of VMIdentity objects, and of the pods that wait for them, as
// Prometheus series. Each scrape counts the objects in the controllers' cache. No series has the
// name of an identity, and this package keeps nothing. Only the leading replica has the series.
package metrics

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
)

var (
	identities = prometheus.NewDesc("kubevirt_disk_identities", "VMIdentity objects by their "+
		"conditions.", []string{"namespace", "condition", "status", "reason"}, nil)
	identitiesSince = prometheus.NewDesc("kubevirt_disk_identities_since_timestamp_seconds",
		"When the first of these VMIdentity objects got this condition, as Unix time.",
		[]string{"namespace", "condition", "status", "reason"}, nil)
	waiting = prometheus.NewDesc("kubevirt_disk_waiting_pods",
		"Pods that wait for their VMIdentity.", []string{"namespace"}, nil)
	waitingSince = prometheus.NewDesc("kubevirt_disk_waiting_pods_since_timestamp_seconds",
		"When the first of the waiting pods was made, as Unix time.", []string{"namespace"}, nil)
)

// collector lists the objects in the cache.
type collector struct {
	reader client.Reader
	leads  <-chan struct{}
}

// New makes the collector of identities and pods. The reader has to be a cache: each scrape lists
// everything. Until leads is closed, there are no series: if all replicas had them, sums would
// count each object several times.
func New(reader client.Reader, leads <-chan struct{}) prometheus.Collector {
	return &collector{reader: reader, leads: leads}
}

func (*collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{identities, identitiesSince, waiting, waitingSince} {
		out <- d
	}
}

// tally is the number of objects in a state, and since when.
type tally struct {
	count int
	since time.Time
}

func (t tally) add(when time.Time) tally {
	if t.count == 0 || when.Before(t.since) {
		t.since = when
	}
	t.count++
	return t
}

func (t tally) emit(out chan<- prometheus.Metric, count, since *prometheus.Desc, labels ...string) {
	out <- prometheus.MustNewConstMetric(count, prometheus.GaugeValue, float64(t.count), labels...)
	out <- prometheus.MustNewConstMetric(since, prometheus.GaugeValue, float64(t.since.Unix()),
		labels...)
}

// timeout is the limit for waiting for the cache to be filled.
const timeout = time.Second

func (c *collector) Collect(out chan<- prometheus.Metric) {
	select {
	case <-c.leads:
	default:
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	var all api.VMIdentityList
	if c.reader.List(ctx, &all, client.UnsafeDisableDeepCopy) == nil {
		found := make(map[[4]string]tally)
		for _, one := range all.Items {
			for _, condition := range one.Status.Conditions {
				key := [4]string{one.Namespace, condition.Type, string(condition.Status),
					condition.Reason}
				found[key] = found[key].add(condition.LastTransitionTime.Time)
			}
			if len(one.Status.Conditions) == 0 {
				key := [4]string{one.Namespace, api.ConditionReady, string(metav1.ConditionUnknown),
					api.ReasonUnknown}
				found[key] = found[key].add(one.CreationTimestamp.Time)
			}
		}
		for key, t := range found {
			t.emit(out, identities, identitiesSince, key[:]...)
		}
	}
	var pods corev1.PodList
	if c.reader.List(ctx, &pods, client.UnsafeDisableDeepCopy) == nil {
		found := make(map[string]tally)
		for _, pod := range pods.Items {
			if pod.DeletionTimestamp == nil && slices.ContainsFunc(pod.Spec.SchedulingGates, ours) {
				found[pod.Namespace] = found[pod.Namespace].add(pod.CreationTimestamp.Time)
			}
		}
		for namespace, t := range found {
			t.emit(out, waiting, waitingSince, namespace)
		}
	}
}

// ours reports whether a gate is of this product.
func ours(gate corev1.PodSchedulingGate) bool {
	return gate.Name == api.Gate || strings.HasPrefix(gate.Name, api.Gate+".")
}
