package kubernetes

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/kubernetes/plane"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/vmdisk"
)

// renewals is a set whose tag has moved on from the image of the disk `vm`.
type renewals struct {
	*signedWorld
	began, now string // images: that of the disk, and what the tag names
	// Digests that the set knows: one of an image that nobody has signed, and one that the
	// registry no longer has.
	unsigned, lost string
	logs           string // of controllers that were killed
}

func newRenewals(t *testing.T, spec string) *renewals {
	t.Helper()
	w := &renewals{signedWorld: newSignedWorld(t)}
	w.unsigned = w.image("unsigned")
	began := w.image("began", w.key)
	w.began = w.host + "/vm/a@" + began
	w.apply(strings.Replace(set("set", `, "follow": {"tag": "1"}, `+spec), testImage,
		w.host+"/vm/a@"+w.unsigned, 1))
	w.follows(began)
	return w
}

// moves lets the tag move on.
func (w *renewals) moves() {
	w.t.Helper()
	w.lost = w.image("lost", w.key)
	w.looks(2)
	w.follows(w.lost)
	now := w.image("now", w.key)
	w.now = w.host + "/vm/a@" + now
	w.looks(3)
	w.follows(now)
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.registry.Store, w.lost)
}

// looks lets the controller ask for the tag: another spec of the set is a reason for that.
func (w *renewals) looks(hours int) {
	w.kubectl("patch", "vmidset", "set", "--type=merge", "-p", fmt.Sprintf(
		`{"spec": {"follow": {"interval": "%dh"}}}`, hours))
}

func (w *renewals) follows(digest string) {
	w.t.Helper()
	w.until(w.host+"/vm/a@"+digest, "get", "vmidset", "set", "-o",
		"jsonpath={.status.followed.image}")
}

// asks lets a user with the role `edit` ask for another image; "-": for none any more.
func (w *renewals) asks(digest string) {
	w.t.Helper()
	annotation := "disk.kubevirt.io/renew" + digest
	if digest != "-" {
		annotation = "disk.kubevirt.io/renew=" + digest
	}
	var out string
	testtool.Within(w.t, patience, func() (ok bool) { // until the role is known
		var err error
		out, err = w.as("tenant", "annotate", "vmid", "vm", "--overwrite", annotation)
		return err == nil
	}, "the disk is annotated: %s", func() any { return out })
}

// says waits for a condition, as "Type Status Reason: message".
func (w *renewals) says(want string) {
	w.t.Helper()
	w.until(want, "get", "vmid", "vm", "-o", `jsonpath={range .status.conditions[*]}{.type} `+
		`{.status} {.reason}: {.message}{"\n"}{end}`)
}

// without waits until a field of the disk, as a JSONPath, has no part with this text any more.
func (w *renewals) without(text, field string) {
	w.t.Helper()
	var is string
	testtool.Within(w.t, patience, func() bool {
		is = w.p.Kubectl(w.t, "-n", w.ns, "get", "vmid", "vm", "-o", "jsonpath={"+field+"}")
		return !strings.Contains(is, text)
	}, "no %s: %s", text, func() any { return is })
}

// takesBack takes back what was asked, and waits until nothing is said about it.
func (w *renewals) takesBack() {
	w.t.Helper()
	w.asks("-")
	w.without("Renewed", ".status.conditions[*].type")
}

// is what a disk is: its image, and its claim with what that says about its content.
func (w *renewals) is() (image, claim string) {
	w.t.Helper()
	image = w.p.Kubectl(w.t, "-n", w.ns, "get", "vmid", "vm", "-o",
		"jsonpath={.spec.image} {.spec.followedTag} {.status.renew}")
	claim = w.p.Kubectl(w.t, "-n", w.ns, "get", "pvc", "vmid-vm", "-o", "jsonpath={.metadata.uid} "+
		`{.metadata.annotations.disk\.kubevirt\.io/content} {.metadata.deletionTimestamp}`)
	return image, claim
}

// crashes kills the controller.
func (w *renewals) crashes() {
	w.t.Helper()
	require.NoError(w.t, w.c.cmd.Process.Kill())
	<-w.c.done
	w.logs += w.c.logs()
}

// holds keeps an object from going when it is deleted, until held is called.
func (w *renewals) holds(object string) {
	w.t.Helper()
	w.p.Kubectl(w.t, "-n", w.ns, "patch", object, "--type=json", "-p",
		`[{"op": "add", "path": "/metadata/finalizers/-", "value": "example.com/hold"}]`)
}

// held waits until only the test holds an object that is being deleted, and then lets it go.
func (w *renewals) held(object string) {
	w.t.Helper()
	w.until(`Z ["example.com/hold"]`, "get", object, "-o",
		"jsonpath={.metadata.deletionTimestamp} {.metadata.finalizers}")
	w.p.Kubectl(w.t, "-n", w.ns, "patch", object, "--type=merge", "-p",
		`{"metadata": {"finalizers": null}}`)
	w.until("NotFound", "get", object)
}

// renewed waits for the end of a renewal, whose claim is not the former one.
func (w *renewals) renewed(former string) {
	w.t.Helper()
	w.says("Renewed True Renewed: the disk began anew from " + w.now + ", and what guests had " +
		"written to the one from " + w.began + " is gone")
	w.without("disk.kubevirt.io/renew", ".metadata.annotations")
	image, claim := w.is()
	require.Equal(w.t, w.now+" 1 ", image)
	uid, says, _ := strings.Cut(claim, " ")
	require.NotContains(w.t, former, uid)
	require.Contains(w.t, says, " "+w.now)
	for _, reason := range []string{"Renewing", "Renewed"} {
		w.until("vm", "get", "events.events.k8s.io", "-o",
			`jsonpath={.items[?(@.reason=="`+reason+`")].regarding.name}`)
	}
	require.NotContains(w.t, w.logs+w.c.logs(), "forbidden")
}

// golden lets the image of the disk come into a snapshot. The test is the driver.
func (w *renewals) golden(image string) (name string) {
	w.t.Helper()
	jobs := []string{"get", "job", "-o", `jsonpath={range .items[*]}{.metadata.annotations.` +
		`disk\.kubevirt\.io/image} {.metadata.name}{"\n"}{end}`}
	w.until(image, jobs...)
	_, name, _ = strings.Cut(w.kubectl(jobs...), image+" ")
	name, _, _ = strings.Cut(name, "\n")
	w.until("persistentvolumeclaim/"+name, "get", "pvc", name, "-o", "name")
	w.volumeFor(name)
	w.until(".k8s.io/"+name, "get", "volumesnapshot", name, "-o", "name") // KWOK has run the Job
	w.kubectl("patch", "volumesnapshot", name, "--subresource=status", "--type=merge", "-p",
		`{"status": {"readyToUse": true, "restoreSize": "20Gi"}}`)
	w.until("VolumeSnapshot "+name, "get", "pvc", "vmid-vm", "-o",
		"jsonpath={.spec.dataSourceRef.kind} {.spec.dataSourceRef.name}")
	w.volumeFor("vmid-vm")
	return name
}

// TestRenewal: a disk begins anew from what the tag of its set names now, because its owner has
// asked. Whoever may only look may not ask, and nobody changes the image. An image that the
// registry does not have, or that nobody has signed, changes nothing. Nothing happens under a pod.
// The controller is killed while the claim is being deleted, and while the next one is made.
func TestRenewal(t *testing.T) {
	installSnapshots(t, plane.Get(t))
	plane.Get(t).Nodes(t, "renewals-1")
	w := newRenewals(t, `"population": "Snapshot", "storageClassName": "renewals"`)
	w.storageClass("renewals")
	runs := func() {
		t.Helper()
		w.until("Running", "get", "pod", "vm", "-o", "jsonpath={.status.phase}")
	}
	w.plainPod("vm")
	before := w.golden(w.began)
	runs()
	w.moves()
	image, claim := w.is()
	require.Equal(t, w.began+" 1 ", image)
	stays := func() {
		t.Helper()
		w.says("Ready True")
		i, c := w.is()
		require.Equal(t, []string{image, claim}, []string{i, c})
	}
	_, now, _ := strings.Cut(w.now, "@")

	w.user("guest", "view")
	w.user("tenant", "edit")
	w.refuses(`cannot patch resource "vmidentities"`, "guest", "annotate", "vmid", "vm",
		"disk.kubevirt.io/renew="+now)
	w.refuses("image is immutable", "tenant", "patch", "vmid", "vm", "--type=merge", "-p",
		`{"spec": {"image": "`+w.now+`"}}`)
	renew := []string{"patch", "vmid", "vm", "--subresource=status", "--type=merge", "-p",
		`{"status": {"renew": {"image": "` + w.now + `", "from": "` + w.began + `"}}}`}
	w.refuses(`resource "vmidentities/status" in`, "tenant", renew...)
	out, err := w.p.TryKubectl(nil, append([]string{"-n", w.ns}, renew...)...)
	require.Error(t, err)
	require.Contains(t, out, "status.renew from what it lets the disk begin anew")

	w.asks(now)
	w.says("Renewed False InUse: the disk begins anew later: pod vm uses it")
	stays()
	w.takesBack()
	w.kubectl("delete", "pod", "vm")
	for digest, says := range map[string]string{
		w.lost:       "TagMissing: the disk stays as it is, because " + w.host + "/vm/a@" + w.lost,
		w.unsigned:   "NotSigned: the disk stays as it is, because " + w.host + "/vm/a@",
		"sha256:new": "Invalid: the disk stays as it is: the annotation",
		"sha256:" + strings.Repeat("0", 64): "Invalid: the disk stays as it is: VMIdentitySet " +
			"set neither has nor had the image",
	} {
		w.asks(digest)
		w.says("Renewed False " + says)
		stays()
	}
	w.takesBack()

	w.plainPod("vm")
	runs()
	w.asks(now)
	w.says("Renewed False InUse: the disk begins anew later: pod vm uses it")
	stays()
	w.holds("pvc/vmid-vm")
	w.kubectl("delete", "pod", "vm")
	w.says("Renewed False Renewing: the claim vmid-vm of the former disk is being deleted")
	w.plainPod("vm") // it waits for the disk, and the disk does not wait for it
	w.asks("-")      // too late
	w.crashes()
	image, _ = w.is()
	require.True(t, strings.HasPrefix(image, w.began+" 1 {"), image)
	w.held("pvc/vmid-vm")
	w.start()
	w.until(w.now, "get", "vmid", "vm", "-o", "jsonpath={.spec.image}")
	w.says("Ready False Populating")
	w.crashes()
	require.NotContains(t, w.free(), "vm")
	w.start()
	after := w.golden(w.now)
	require.NotEqual(t, before, after)
	runs()
	w.renewed(claim)
	w.until("NotFound", "get", "job", before)
	w.until(w.now, "get", "vmid", "vm", "-o", "jsonpath={.status.signedBy.image}")
}

// TestRenewalOfAServedDisk: the server of a disk ends before its claim is deleted, when nobody is
// logged in. Until then, the owner can take it back, and the server is made again. The controller
// is killed meanwhile.
func TestRenewalOfAServedDisk(t *testing.T) {
	plane.Get(t).Nodes(t, "renewals-2")
	w := newRenewals(t, `"attachment": "Service", "storageClassName": "served"`)
	w.storageClass("served")
	w.apply(`
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMIdentity
metadata: {name: vm}
spec: {image: "` + w.began + `", setName: set, followedTag: "1", attachment: Service,
  storageClassName: served}
`)
	w.user("tenant", "edit")
	w.until("persistentvolumeclaim/vmid-vm", "get", "pvc", "vmid-vm", "-o", "name")
	w.volumeFor("vmid-vm")
	w.moves()
	_, now, _ := strings.Cut(w.now, "@")
	first := w.serving()
	image, claim := w.is()
	stays := func() {
		t.Helper()
		i, c := w.is()
		require.Equal(t, []string{image, claim}, []string{i, c})
	}
	const ends = "Renewed False Renewing: the server of the disk ends first: "
	w.asks(now)
	w.says(ends + first + " does not say who is logged in to the disk, so the disk stays")
	w.crashes()
	w.start()
	var page atomic.Value // what the server says of itself
	page.Store(`{"sessions": [{"initiator": "iqn.2026-11.com.example:vm"}]}`)
	serve := func(pod string) *http.Server {
		t.Helper()
		address := w.kubectl("get", "pod", strings.TrimPrefix(pod, "pod "), "-o",
			"jsonpath={.status.podIP}")
		l, err := net.Listen("tcp", net.JoinHostPort(address, strconv.Itoa(vmdisk.FirstPagesPort)))
		require.NoError(t, err)
		server := &http.Server{Handler: http.HandlerFunc(func(res http.ResponseWriter,
			_ *http.Request) {
			_, _ = io.WriteString(res, page.Load().(string))
		})}
		t.Cleanup(func() { server.Close() })
		go func() { _ = server.Serve(l) }() // until it is closed
		return server
	}
	served := serve(first)
	w.says(ends + "the disk is in use, and served until that ends: initiator iqn.2026-11.com")
	w.takesBack()
	w.says("Ready True")
	stays()
	require.Equal(t, first, w.serving(), "it was not ended")

	page.Store(`{"sessions": []}`)
	w.asks(now)
	w.says(ends + "the server is ending")
	w.takesBack()
	w.held(strings.Replace(first, " ", "/", 1))
	require.NoError(t, served.Close()) // KWOK gives its address to the next pod
	second := w.serving()
	require.NotEqual(t, first, second)
	stays()

	serve(second)
	w.asks(now)
	w.says(ends + "the server is ending")
	w.crashes()
	w.held(strings.Replace(second, " ", "/", 1))
	w.start()
	w.until(w.now, "get", "vmid", "vm", "-o", "jsonpath={.spec.image}")
	w.until(w.now, "get", "pvc", "vmid-vm", "-o",
		`jsonpath={.metadata.annotations.disk\.kubevirt\.io/content}`)
	w.volumeFor("vmid-vm")
	w.serving()
	w.renewed(claim)
	deployment := w.kubectl("get", "deployment", "vmid-vm", "-o", "yaml")
	require.Contains(t, deployment, w.now)
	require.NotContains(t, deployment, w.began)
}

// serving waits until the disk is served, and keeps that pod from going. It returns "pod NAME".
func (w *renewals) serving() string {
	w.t.Helper()
	w.says("Served True Serving")
	w.says("Ready True")
	message := w.kubectl("get", "vmid", "vm", "-o",
		`jsonpath={.status.conditions[?(@.type=="Served")].message}`)
	pod, _, _ := strings.Cut(message, " serves")
	w.p.Kubectl(w.t, "-n", w.ns, "patch", "pod", strings.TrimPrefix(pod, "pod "), "--type=merge",
		"-p", `{"metadata": {"finalizers": ["example.com/hold"]}}`)
	return pod
}
