// Package missed finds pods that ask for a disk and run without one. Admission gives a pod its disk
// when the pod is made. A pod that was made while no policy or webhook was in force, as in the
// seconds before an installation is complete, has the annotation and nothing else. The controllers
// do not see it, because it has no label. So this package looks at all pods from time to time, at
// their metadata alone, and says on the pod and on its VMIdentitySet that the disk is missing.
package missed

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/inject"
)

// How often to look. An installation takes minutes, and pods are rarely missed later.
const (
	soon   = 20 * time.Second
	early  = 10 * time.Minute
	seldom = 10 * time.Minute
	page   = 500
)

// Watcher looks for pods without their disk.
type Watcher struct {
	client.Client
	// Live reads from the API server: the cache has no pods without a label.
	Live   client.Reader
	Events events.EventRecorder
	// Namespaces to look in; none: all.
	Namespaces []string

	told map[types.UID]bool // pods that have their event
}

// Setup adds the watcher to a manager.
func Setup(mgr ctrl.Manager, namespaces []string) error {
	return mgr.Add(&Watcher{Client: mgr.GetClient(), Live: mgr.GetAPIReader(),
		Events: mgr.GetEventRecorder(v1alpha1.FieldManager), Namespaces: namespaces})
}

// NeedLeaderElection lets only the leader look.
func (w *Watcher) NeedLeaderElection() bool { return true }

// Start looks until the context ends.
func (w *Watcher) Start(ctx context.Context) error {
	for began := time.Now(); ; {
		err := w.Look(ctx)
		if err != nil && ctx.Err() == nil {
			ctrl.LoggerFrom(ctx).Error(err, "looking for pods without their disk")
		}
		wait := seldom
		if err != nil || time.Since(began) < early {
			wait = soon
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

// Look looks once at all pods.
func (w *Watcher) Look(ctx context.Context) error {
	where := w.Namespaces
	if len(where) == 0 {
		where = []string{metav1.NamespaceAll}
	}
	missed := map[types.NamespacedName][]string{} // pods by set
	told := map[types.UID]bool{}
	for _, namespace := range where {
		if err := w.pods(ctx, namespace, missed, told); err != nil {
			return err
		}
	}
	w.told = told
	var sets v1alpha1.VMIdentitySetList
	if err := w.List(ctx, &sets); err != nil {
		return fmt.Errorf("VMIdentitySets: %w", err)
	}
	for i := range sets.Items {
		set := &sets.Items[i]
		if err := w.say(ctx, set, missed[client.ObjectKeyFromObject(set)]); err != nil {
			return err
		}
	}
	return nil
}

// pods adds the pods of a namespace without their disk, and sends an event about each new one.
func (w *Watcher) pods(ctx context.Context, namespace string,
	missed map[types.NamespacedName][]string, told map[types.UID]bool) error {
	without, err := labels.NewRequirement(v1alpha1.LabelSet, selection.DoesNotExist, nil)
	if err != nil {
		return err
	}
	options := &client.ListOptions{Namespace: namespace, Limit: page,
		LabelSelector: labels.NewSelector().Add(*without)}
	for {
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("PodList"))
		if err := w.Live.List(ctx, list, options); err != nil {
			return fmt.Errorf("pods: %w", err)
		}
		for i := range list.Items {
			p := &list.Items[i]
			disks := inject.Disks(&corev1.Pod{ObjectMeta: p.ObjectMeta})
			if len(disks) == 0 || disks[0].Set == "" || p.DeletionTimestamp != nil {
				continue
			}
			pod := &corev1.Pod{}
			err := w.Live.Get(ctx, client.ObjectKeyFromObject(p), pod)
			if client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("pod %s: %w", p.Name, err)
			}
			if err != nil || pod.UID != p.UID || objects.Finished(pod) {
				continue
			}
			if told[p.UID] = true; !w.told[p.UID] {
				objects.Event(w.Events, pod, nil, v1alpha1.ReasonNoDisk, fmt.Sprintf(
					"the pod asks for VMIdentitySet %s and runs without its disk, because it was "+
						"made while the admission of kubevirt-disk was not in force: delete the "+
						"pod, and make it again", disks[0].Set))
			}
			for _, d := range disks {
				key := types.NamespacedName{Namespace: p.Namespace, Name: d.Set}
				if !slices.Contains(missed[key], p.Name) {
					missed[key] = append(missed[key], p.Name)
				}
			}
		}
		if options.Continue = list.Continue; options.Continue == "" {
			return nil
		}
	}
}

// say writes the condition of a set. Without pods, a condition that was never written stays away.
func (w *Watcher) say(ctx context.Context, set *v1alpha1.VMIdentitySet, pods []string) error {
	c := metav1.Condition{Type: v1alpha1.ConditionPodsWithoutDisk, Status: metav1.ConditionFalse,
		Reason: v1alpha1.ReasonReady, Message: "each pod that asks for this set has a disk"}
	if len(pods) > 0 {
		slices.Sort(pods)
		const most = 10
		names := strings.Join(pods[:min(len(pods), most)], ", ")
		if len(pods) > most {
			names += fmt.Sprintf(" and %d more", len(pods)-most)
		}
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonNoDisk
		c.Message = "these pods were made while the admission of kubevirt-disk was not in force, " +
			"and run without their disk: delete them, and make them again: " + names
	} else if meta.FindStatusCondition(set.Status.Conditions, c.Type) == nil {
		return nil
	}
	after := set.DeepCopy()
	objects.SetCondition(&after.Status.Conditions, set.Generation, c)
	if err := objects.PatchStatus(ctx, w.Client, set, after); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("status of VMIdentitySet %s: %w", set.Name, err))
	}
	return nil
}
