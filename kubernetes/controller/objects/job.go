package objects

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Ended is the condition that says how a Job has ended; its type is "" until then.
func Ended(job *batchv1.Job) batchv1.JobCondition {
	for _, c := range job.Status.Conditions {
		if c.Status == corev1.ConditionTrue &&
			(c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed) {
			return c
		}
	}
	return batchv1.JobCondition{}
}

// Left is how long a Job that has ended stays, if it stays for a while. One that ends in the
// future, by a clock that was wrong, stays no longer.
func Left(ended batchv1.JobCondition, while time.Duration) time.Duration {
	left := time.Until(ended.LastTransitionTime.Add(while))
	if left > 2*while {
		return 0
	}
	return left
}

// LastWords returns what the last pod of a Job said at its end: of the pods that succeeded if the
// Job did, else of those that failed. The pods have the name of the Job in a label.
func LastWords(ctx context.Context, from client.Reader, job *batchv1.Job, label string) (string,
	error) {
	var pods corev1.PodList
	if err := from.List(ctx, &pods, client.InNamespace(job.Namespace),
		client.MatchingLabels{label: job.Name}); err != nil {
		return "", fmt.Errorf("pods of Job %s: %w", job.Name, err)
	}
	slices.SortFunc(pods.Items, func(a, b corev1.Pod) int {
		return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
	})
	complete := Ended(job).Type == batchv1.JobComplete
	said := ""
	for _, pod := range pods.Items {
		for _, c := range pod.Status.ContainerStatuses {
			if t := c.State.Terminated; t != nil && (t.ExitCode == 0) == complete &&
				metav1.IsControlledBy(&pod, job) {
				said = cmp.Or(lastLine(t.Message), said)
			}
		}
	}
	return said, nil
}

// DeleteJob deletes a Job: in the foreground after its pods, else before them.
func DeleteJob(ctx context.Context, c client.Client, job *batchv1.Job,
	how metav1.DeletionPropagation) error {
	if job.DeletionTimestamp != nil {
		return nil
	}
	err := c.Delete(ctx, job, client.Preconditions{UID: &job.UID}, client.PropagationPolicy(how))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("deletion of Job %s: %w", job.Name, err)
	}
	return nil
}

// lastLine is the last line of a log that is not empty, shortened to fit into a condition.
func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	line := strings.TrimSpace(lines[len(lines)-1])
	if len(line) > 500 {
		line = "..." + strings.ToValidUTF8(line[len(line)-500:], "")
	}
	return line
}
