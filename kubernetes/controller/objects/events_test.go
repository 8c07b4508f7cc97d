package objects

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// TestTell: a changed condition is sent as an event, once for each reason, if the reason has one.
// The API server takes no longer note. It counts a part of a character as a whole one.
func TestTell(t *testing.T) {
	condition := func(kind, reason, message string) metav1.Condition {
		return metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: reason,
			Message: message}
	}
	before := []metav1.Condition{condition("Old", v1alpha1.ReasonFailed, "said already")}
	after := append(before, condition("A", v1alpha1.ReasonInvalid, strings.Repeat("x", 1019)+
		strings.Repeat("☃", 9)), // three bytes each
		condition("B", v1alpha1.ReasonInvalid, "of the same reason"),
		condition("C", v1alpha1.ReasonStarting, "goes on by itself"))
	long := "Warning Invalid " + strings.Repeat("x", 1019) + "..."
	normal := func(reason string) string { return corev1.EventTypeNormal }
	for name, c := range map[string]struct {
		kind func(string) string
		want []string
	}{
		"as everywhere": {EventType, []string{long}},
		"all": {normal, []string{strings.Replace(long, "Warning", "Normal", 1),
			"Normal Starting goes on by itself"}},
	} {
		sent := make(chan string, 10)
		with := func(c []metav1.Condition) *v1alpha1.VMIdentity {
			return &v1alpha1.VMIdentity{Status: v1alpha1.VMIdentityStatus{Conditions: c}}
		}
		Kit{Events: &events.FakeRecorder{Events: sent}}.Tell(with(before), with(after), c.kind)
		close(sent)
		var got []string
		for e := range sent {
			got = append(got, e)
		}
		require.Equal(t, c.want, got, name)
	}
}
