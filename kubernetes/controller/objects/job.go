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

// Ended is the condition with the result of a Job; its type is "" until the Job has ended.
func Ended(job *batchv1.Job) batchv1.JobCondition {
	for _, c := range job.Status.Conditions {
		if c.Status == corev1.ConditionTrue &&
			(c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed) {
			return c
		}
	}
	return batchv1.JobCondition{}
}

// Left is how long an ended Job still stays, if it stays for a while. An end in the future, from a
// wrong clock, does not prolong this.
func Left(ended batchv1.JobCondition, while time.Duration) time.Duration {
	left := time.Until(ended.LastTransitionTime.Add(while))
	if left > 2*while {
		return 0
	}
	return left
}

// LastWords returns the last message of the last pod of a Job: of the pods that succeeded if the
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

// DeleteJob deletes a Job: after its pods in the foreground, else before them.
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
