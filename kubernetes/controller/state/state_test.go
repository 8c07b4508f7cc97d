package state

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/pages"
	"kubevirt.io/disk/status"
)

func server(port string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "vm",
		Labels: map[string]string{v1alpha1.LabelIdentity: "vm"}}}
	p.Spec.InitContainers = []corev1.Container{{Name: v1alpha1.DiskContainer,
		Ports: []corev1.ContainerPort{{Name: port, ContainerPort: 9270}}}}
	p.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "vmid-vm"}}}}
	p.Status.PodIP = "192.0.2.7"
	return p
}

// claimOf is the claim of an identity.
func claimOf(name string) *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{
		Name: v1alpha1.ClaimName(name), Labels: map[string]string{v1alpha1.LabelIdentity: name}}}
}

// asking is a controller whose pods answer as the test wants, whenever they are asked.
type asking struct {
	*controllertest.World
	t     *testing.T
	r     *Reconciler
	luns  []status.LUN
	err   error
	asked []string
}

// Answers of pods.
var (
	copying = []status.LUN{{Ready: true, CopyMode: "clone", Copy: &status.Copy{}}}
	copied  = []status.LUN{{Ready: true, CopyMode: "clone", Copy: &status.Copy{Complete: true}}}
	kept    = []status.LUN{{Ready: true, CopyMode: "copy-on-write"}}
)

func newAsking(t *testing.T, p *corev1.Pod) *asking {
	a := &asking{t: t, luns: copying, World: controllertest.New(t, []controllertest.Index{
		{Object: &corev1.Pod{}, Field: objects.IndexIdentity, Of: objects.ByIdentity}}, p,
		&v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Name: "vm"}}, claimOf("vm"))}
	a.restart()
	return a
}

func (a *asking) restart() {
	a.r = &Reconciler{Kit: objects.Kit{Client: a.Client, Live: a.Live, Events: a.World},
		Ask: func(_ context.Context, address string) (*status.Status, error) {
			a.asked = append(a.asked, address)
			return &status.Status{LUNs: a.luns}, a.err
		}}
}

// reconcile asks now, whatever the pace is. It returns condition Hydrated, and when the pod is due
// again.
func (a *asking) reconcile() (string, ctrl.Result) {
	a.t.Helper()
	key := types.NamespacedName{Namespace: "test", Name: "vm"}
	if p, known := a.r.pace[key]; known {
		p.next = time.Now()
		a.r.pace[key] = p
	}
	result, err := controllertest.Once(a.t, a.r, "vm")
	if err != nil {
		return "error", result
	}
	id, _ := a.identity()
	c := meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionHydrated)
	if c == nil {
		return "", result
	}
	return string(c.Status) + " " + c.Reason, result
}

func TestUntilComplete(t *testing.T) {
	a := newAsking(t, server("pages-vda"))
	a.luns = nil
	is, result := a.reconcile()
	require.Empty(t, is)
	require.Equal(t, first, result.RequeueAfter)
	a.luns = copying
	var waits []float64
	for range 6 {
		is, result = a.reconcile()
		require.Equal(t, "False Hydrating", is)
		waits = append(waits, result.RequeueAfter.Seconds())
	}
	require.Equal(t, []float64{4, 8, 16, 32, 60, 60}, waits)
	require.Equal(t, 1, a.Writes(), "nothing is written that has not changed")
	require.Equal(t, "192.0.2.7:9270", a.asked[0])

	a.luns = copied
	a.Calls.Fail = a.Calls.Reads + a.Calls.Writes + 5 // the write of the answer
	is, _ = a.reconcile()
	require.Equal(t, "error", is)
	a.restart()
	is, _ = a.reconcile()
	require.Equal(t, "True Hydrated", is)
	require.Equal(t, []string{"Normal Hydrated"}, a.Events())

	// The answer is final, also for another pod and another process.
	a.restart()
	a.luns = copying
	is, _ = a.reconcile()
	require.Equal(t, "True Hydrated", is)
	require.Equal(t, 2, a.Writes())
}

func TestKept(t *testing.T) {
	a := newAsking(t, server("pages-vda"))
	a.luns = kept
	is, _ := a.reconcile()
	require.Equal(t, "False ImageKept", is)
}

func TestPodThatDoesNotAnswer(t *testing.T) {
	a := newAsking(t, server("other"))
	a.err = errors.New("dial tcp 192.0.2.7:41234: i/o timeout")
	for range tooMany - 1 {
		is, _ := a.reconcile()
		require.Empty(t, is)
	}
	is, result := a.reconcile()
	require.Equal(t, "Unknown Unknown", is)
	require.Equal(t, last, result.RequeueAfter)
	require.Equal(t, []string{"Warning Unknown"}, a.Events())
	require.Equal(t, "192.0.2.7:9260", a.asked[0], "the port that pods have unless they say it")
	a.err = nil
	is, _ = a.reconcile()
	require.Equal(t, "False Hydrating", is)
}

func TestNobodyToAsk(t *testing.T) {
	for what, change := range map[string]func(*corev1.Pod){
		"no address":   func(p *corev1.Pod) { p.Status.PodIP = "" },
		"ended":        func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded },
		"serves none":  func(p *corev1.Pod) { p.Spec.InitContainers = nil },
		"has no claim": func(p *corev1.Pod) { p.Spec.Volumes = nil },
		"another disk": func(p *corev1.Pod) { p.Labels[v1alpha1.LabelIdentity] = "other" },
	} {
		p := server("pages-vda")
		change(p)
		a := newAsking(t, p)
		is, result := a.reconcile()
		require.Empty(t, is, what)
		require.Zero(t, result, what)
		require.Empty(t, a.asked, what)
	}
}

// The page has the daemon's own type.
func TestPages(t *testing.T) {
	for what, c := range map[string]struct {
		luns   []status.LUN
		reason string
	}{
		"none":      {nil, ""},
		"not ready": {[]status.LUN{{CopyMode: "clone"}}, ""},
		"copying":   {copying, v1alpha1.ReasonHydrating},
		"copied":    {copied, v1alpha1.ReasonHydrated},
		"kept":      {kept, v1alpha1.ReasonImageKept},
		"all read": {[]status.LUN{{Ready: true, CopyMode: "copy-on-read",
			Copy: &status.Copy{Complete: true}}}, v1alpha1.ReasonHydrated},
		"one of two":         {slices.Concat(copied, copying), v1alpha1.ReasonHydrating},
		"kept and copying":   {slices.Concat(kept, copying), v1alpha1.ReasonHydrating},
		"one that is kept":   {slices.Concat(kept, copied), v1alpha1.ReasonImageKept},
		"one is still to be": {slices.Concat(copied, []status.LUN{{}}), ""},
	} {
		mux := http.NewServeMux()
		pages.Register(mux, pages.Daemon{
			Status: func() status.Status { return status.Status{LUNs: c.luns} },
			Ready:  func() error { return nil }, Health: func() error { return nil }})
		s := httptest.NewServer(mux)
		page, err := objects.ReadStatus(t.Context(), strings.TrimPrefix(s.URL, "http://"))
		s.Close()
		require.NoError(t, err)
		got, known := isHydrated(server("pages"), page.LUNs, tooMany-1)
		require.Equal(t, c.reason, got.Reason, what)
		require.Equal(t, c.reason != "", known, what)
	}
}

func TestPagesThatAreNone(t *testing.T) {
	elsewhere := 0
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		elsewhere++
	}))
	defer other.Close()
	for _, answer := range []http.HandlerFunc{
		func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) },
		func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("hello")) },
		func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, other.URL, http.StatusFound)
		},
		func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte(`{"luns": [` + strings.Repeat(" ", objects.MaxPage)))
		},
	} {
		s := httptest.NewServer(answer)
		_, err := objects.ReadStatus(t.Context(), strings.TrimPrefix(s.URL, "http://"))
		s.Close()
		require.Error(t, err)
	}
	require.Zero(t, elsewhere)
}

// identity is the VMIdentity, with the message of condition Hydrated.
func (a *asking) identity() (*v1alpha1.VMIdentity, string) {
	a.t.Helper()
	id := controllertest.Get(a.t, a.Base, controllertest.Namespace, "vm", &v1alpha1.VMIdentity{})
	if c := meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionHydrated); c != nil {
		return id, c.Message
	}
	return id, ""
}

// TestClaimThatWasRestored: what is known of a claim is not said of another one that a backup has
// brought back under its name.
func TestClaimThatWasRestored(t *testing.T) {
	a := newAsking(t, server("pages-vda"))
	a.luns = copied
	is, _ := a.reconcile()
	require.Equal(t, "True Hydrated", is)
	claim := controllertest.Get(t, a.Base, controllertest.Namespace, "vmid-vm",
		&corev1.PersistentVolumeClaim{})
	id, _ := a.identity()
	require.Equal(t, claim.UID, id.Status.HydratedClaim)
	require.True(t, id.NeedsNoImage(claim.UID))

	require.NoError(t, a.Base.Delete(t.Context(), claim))
	is, _ = a.reconcile()
	require.Empty(t, is, "there is no claim")
	a.Make(t, claimOf("vm"))
	a.luns = copying
	is, _ = a.reconcile()
	require.Equal(t, "False Hydrating", is)
	id, _ = a.identity()
	require.Empty(t, id.Status.HydratedClaim)

	// A condition without a claim is from a backup of the identity.
	meta.SetStatusCondition(&id.Status.Conditions, metav1.Condition{Status: metav1.ConditionTrue,
		Type: v1alpha1.ConditionHydrated, Reason: v1alpha1.ReasonHydrated})
	require.NoError(t, a.Base.Status().Update(t.Context(), id))
	is, _ = a.reconcile()
	require.Equal(t, "False Hydrating", is)
}

// TestAnswerOfAPodThatHasEnded: its claim may be another one by now. The address of one that has
// got another, as when its node was started again, may be that of another pod.
func TestAnswerOfAPodThatHasEnded(t *testing.T) {
	a := newAsking(t, server("pages-vda"))
	a.luns = copied
	moved := controllertest.Get(t, a.Base, controllertest.Namespace, "vm", &corev1.Pod{})
	moved.Status.PodIP = "192.0.2.8"
	for what, live := range map[string]client.Reader{
		"it has ended":    controllertest.Labelled(a.Live, "none", &corev1.Pod{}),
		"another address": controllertest.Late(a.Live, moved),
	} {
		a.r.Live = live
		is, _ := a.reconcile()
		require.Empty(t, is, what)
	}
}

// TestWhetherTheImageMayGo: the message says so only if no pod gets the image any more.
func TestWhetherTheImageMayGo(t *testing.T) {
	withImage := server("pages-vda")
	withImage.Spec.Volumes = append(withImage.Spec.Volumes, corev1.Volume{Name: "image",
		VolumeSource: corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: "image"}}})
	for what, c := range map[string]struct {
		pod     *corev1.Pod
		service bool
		local   bool
		says    string
	}{
		"a sidecar":               {withImage, false, false, "new pods start without it"},
		"a server with the image": {withImage, true, false, "keep the image until its server"},
		"a server without it":     {server("pages-vda"), true, false, "start without it"},
		"a local disk":            {withImage, false, true, "its pods mount it"},
	} {
		a := newAsking(t, c.pod.DeepCopy())
		id, _ := a.identity()
		if c.local {
			id.Spec.Type = v1alpha1.Local
			require.NoError(t, a.Base.Update(t.Context(), id))
		}
		if c.service {
			id.Spec.Attachment = v1alpha1.Service
			require.NoError(t, a.Base.Update(t.Context(), id))
		}
		a.luns = copied
		is, _ := a.reconcile()
		require.Equal(t, "True Hydrated", is, what)
		_, message := a.identity()
		require.Contains(t, message, c.says, what)
	}
}

// TestTroubled: people see the worst of what a pod's disks are doing, once it begins, when it is
// another trouble, and when it is over. A disk that works has no condition.
func TestTroubled(t *testing.T) {
	a := newAsking(t, server("pages-vda"))
	now := func(states ...status.DiskState) *metav1.Condition {
		t.Helper()
		a.luns = nil
		for i, state := range states {
			a.luns = append(a.luns, status.LUN{LUN: uint16(i + 1), Condition: status.Condition{
				State: state, Reason: "why " + strings.Repeat("é", maxText), Since: time.Now()}})
		}
		a.reconcile()
		id, _ := a.identity()
		return meta.FindStatusCondition(id.Status.Conditions, v1alpha1.ConditionTroubled)
	}
	require.Nil(t, now(status.DiskReady, status.DiskStarting))
	c := now(status.DiskReady, status.DiskNoSpace, status.DiskWaiting)
	require.Equal(t, metav1.ConditionTrue, c.Status)
	require.Equal(t, v1alpha1.ReasonDiskWaits, c.Reason)
	require.Contains(t, c.Message, "LUN 3 is waiting since ")
	require.LessOrEqual(t, len(c.Message), maxText)
	first := c.Message
	require.Equal(t, first, now(status.DiskWaiting).Message, "the same trouble is told once")
	require.Equal(t, v1alpha1.ReasonDiskFull, now(status.DiskNoSpace).Reason)
	a.err = errors.New("no route")
	require.Equal(t, v1alpha1.ReasonDiskFull, now().Reason, "nobody knows")
	a.err = nil
	require.Equal(t, v1alpha1.ReasonDiskFull, now().Reason, "the pod has just begun")
	require.Equal(t, v1alpha1.ReasonDiskFull, now(status.DiskStarting).Reason)
	c = now(status.DiskReady)
	require.Equal(t, metav1.ConditionFalse, c.Status)
	require.Equal(t, v1alpha1.ReasonDiskRecovered, c.Reason)
	require.Equal(t, v1alpha1.ReasonDiskFailed, now(status.DiskFailed).Reason)
	require.NoError(t, a.Base.DeleteAllOf(t.Context(), &corev1.Pod{},
		client.InNamespace(controllertest.Namespace)))
	require.Equal(t, v1alpha1.ReasonNotInUse, now().Reason)
}

// TestTroubleOfAHydratedDisk: that a disk needs its image no more does not end the questions.
func TestTroubleOfAHydratedDisk(t *testing.T) {
	a := newAsking(t, server("pages-vda"))
	a.luns = copied
	is, _ := a.reconcile()
	require.Equal(t, "True Hydrated", is)
	a.luns = []status.LUN{{Condition: status.Condition{State: status.DiskFailing}}}
	is, result := a.reconcile()
	require.Equal(t, "True Hydrated", is)
	require.NotZero(t, result.RequeueAfter)
	id, _ := a.identity()
	require.True(t, meta.IsStatusConditionTrue(id.Status.Conditions, v1alpha1.ConditionTroubled))

	// It is asked no more often than that.
	asked := len(a.asked)
	require.NoError(t, testtool.Err(controllertest.Once(t, a.r, "vm")))
	require.Len(t, a.asked, asked)
}
