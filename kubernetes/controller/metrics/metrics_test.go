package metrics_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	controllermetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"kubevirt.io/disk/internal/testtool"
	api "kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/metrics"
)

// lists is a reader of its own objects.
type lists struct {
	identities []api.VMIdentity
	pods       []corev1.Pod
	err        error
}

func (l lists) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errors.New("not here")
}

func (l lists) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	switch list := list.(type) {
	case *api.VMIdentityList:
		list.Items = l.identities
	case *corev1.PodList:
		list.Items = l.pods
	}
	return l.err
}

func identity(namespace string, conditions ...metav1.Condition) api.VMIdentity {
	return api.VMIdentity{ObjectMeta: metav1.ObjectMeta{Namespace: namespace,
		CreationTimestamp: metav1.Unix(50, 0)},
		Status: api.VMIdentityStatus{Conditions: conditions}}
}

func condition(kind string, status metav1.ConditionStatus, reason string,
	since int64) metav1.Condition {
	return metav1.Condition{Type: kind, Status: status, Reason: reason,
		LastTransitionTime: metav1.NewTime(time.Unix(since, 0))}
}

// TestSeries: the replica that leads has the series, and the others have none.
func TestSeries(t *testing.T) {
	gated := corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: api.Gate}}}
	further := corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: api.Gate + ".9"}}}
	foreign := corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: api.Gate + "s"}}}
	at := func(seconds int64) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "a", CreationTimestamp: metav1.Unix(seconds, 0)}
	}
	going := at(1)
	going.DeletionTimestamp = &metav1.Time{}
	all := lists{
		identities: []api.VMIdentity{
			identity("a", condition("Ready", "True", "Ready", 30),
				condition("Hydrated", "False", "Hydrating", 31)),
			identity("a", condition("Ready", "True", "Ready", 20)),
			identity("b", condition("Ready", "False", "ClaimLost", 40)),
			identity("b"),
		},
		pods: []corev1.Pod{{ObjectMeta: at(70), Spec: gated}, {ObjectMeta: at(60), Spec: further},
			{ObjectMeta: at(2)}, {ObjectMeta: at(3), Spec: foreign},
			{ObjectMeta: going, Spec: gated}},
	}
	want := testtool.Must(os.Open("testdata/metrics.txt"))(t)
	defer want.Close()
	require.Zero(t, testutil.CollectAndCount(metrics.New(all, make(chan struct{}))), "a replica")
	require.NoError(t, testutil.CollectAndCompare(metrics.New(all, leads), want))
	all.err = errors.New("no cache")
	require.Zero(t, testutil.CollectAndCount(metrics.New(all, leads)))
}

// leads is closed, as for a replica that leads.
var leads = func() <-chan struct{} {
	closed := make(chan struct{})
	close(closed)
	return closed
}()

const folder = "../../../"

// alertRules is a PrometheusRule.
type alertRules struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string
	Metadata   map[string]string
	Spec       struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Alert, Expr, For    string
				Labels, Annotations map[string]string
			}
		}
	}
}

// known are the labels of each series that an expression may name.
func known(t *testing.T) map[string][]string {
	t.Helper()
	pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "a"}, Spec: corev1.PodSpec{
		SchedulingGates: []corev1.PodSchedulingGate{{Name: api.Gate}}}}
	own := prometheus.NewRegistry()
	own.MustRegister(metrics.New(lists{identities: []api.VMIdentity{identity("a")},
		pods: []corev1.Pod{pod}}, leads))
	all := map[string][]string{
		// No controller runs here. These series are controller-runtime's, see its documentation.
		"controller_runtime_reconcile_total": {"controller", "result"},
		"workqueue_depth":                    {"name", "controller", "priority"},
	}
	families := testtool.Must(prometheus.Gatherers{own, controllermetrics.Registry}.Gather())(t)
	for _, f := range families {
		for _, l := range f.Metric[0].Label {
			all[f.GetName()] = append(all[f.GetName()], l.GetName())
		}
	}
	// Metrics of the disks. A test in integration checks which ones a daemon has.
	page := testtool.Must(os.ReadFile(folder + "docs/metrics.md"))(t)
	for _, name := range regexp.MustCompile("`(kubevirt_disk_[a-z_]+)`").FindAllSubmatch(page, -1) {
		all[string(name[1])] = []string{"lun", "image", "namespace", "pod", "state", "kind"}
	}
	return all
}

var reasonValue = regexp.MustCompile(`(?:reason|condition)=~?"([A-Za-z|]+)"`)

// checkExpression finds names of series, labels and reasons that do not exist.
func checkExpression(t *testing.T, known map[string][]string, words, expr string, texts ...string) {
	t.Helper()
	testtool.CheckExpression(t, known, expr, texts...)
	for _, m := range reasonValue.FindAllStringSubmatch(expr, -1) {
		for value := range strings.SplitSeq(m[1], "|") {
			require.Contains(t, words, `"`+value+`"`, "%s: no condition has %s", expr, value)
		}
	}
}

// conditions is the source of the names of conditions and reasons.
func conditions(t *testing.T) string {
	t.Helper()
	return string(testtool.Must(os.ReadFile(folder + "kubernetes/api/v1alpha1/conditions.go"))(t))
}

func TestAlerts(t *testing.T) {
	text := testtool.Must(os.ReadFile(folder + "kubernetes/chart/files/alerts.yaml"))(t)
	var rules alertRules
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	require.NoError(t, decoder.Decode(&rules))
	all, words := known(t), conditions(t)
	runbook := testtool.Must(os.ReadFile(folder + "docs/alerts.md"))(t)
	require.Equal(t, "PrometheusRule", rules.Kind)
	var names []string
	for _, g := range rules.Spec.Groups {
		for _, r := range g.Rules {
			require.NotContains(t, names, r.Alert)
			names = append(names, r.Alert)
			require.Contains(t, string(runbook), "\n## "+r.Alert+"\n", "docs/alerts.md")
			require.Contains(t, []string{"info", "warning", "critical"}, r.Labels["severity"])
			require.NotEmpty(t, r.Annotations["summary"], r.Alert)
			require.NotEmpty(t, r.Annotations["description"], r.Alert)
			checkExpression(t, all, words, r.Expr, r.Annotations["summary"],
				r.Annotations["description"])
		}
	}
	require.Len(t, names, 10)
}

func TestDashboard(t *testing.T) {
	d := testtool.ReadDashboard(t, folder+"examples/kubernetes/grafana-identities.json")
	all, words := known(t), conditions(t)
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			checkExpression(t, all, words, target.Expr, target.LegendFormat)
		}
	}
	require.Len(t, d.Panels, 12)
}

// TestReasonsAreExplained: the page for people has each condition, and each reason that needs some
// action.
func TestReasonsAreExplained(t *testing.T) {
	page := testtool.Must(os.ReadFile(folder + "docs/kubernetes.md"))(t)
	plain := []string{"Ready", "ClaimBound", "NotInUse", "Hydrated", "Hydrating", "Unknown",
		"Moved", "Serving"}
	for _, m := range regexp.MustCompile(`(Condition|Reason)\w+\s*= "(\w+)"`).FindAllStringSubmatch(
		conditions(t), -1) {
		if m[1] == "Condition" || !slices.Contains(plain, m[2]) {
			require.Contains(t, string(page), "`"+m[2]+"`", "docs/kubernetes.md")
		}
	}
	for _, m := range regexp.MustCompile("`(kubevirt_disk_[a-z_]+)`").FindAllStringSubmatch(
		string(page), -1) {
		require.Contains(t, known(t), m[1])
	}
}
