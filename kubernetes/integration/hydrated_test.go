package kubernetes

import (
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/status"
)

// TestHydratedPodHasNoImage: with the manifest as it is, a pod that is made after its disk is
// `Hydrated` mounts no image, as the message of the condition says.
func TestHydratedPodHasNoImage(t *testing.T) {
	w := newWorld(t)
	w.apply(set("set", ""))
	images := func() (found []string) {
		pod := &corev1.Pod{}
		require.NoError(t, w.p.Client.Get(t.Context(),
			client.ObjectKey{Namespace: w.ns, Name: "vm"}, pod))
		for _, v := range pod.Spec.Volumes {
			if v.Image != nil {
				found = append(found, v.Image.Reference)
			}
		}
		return found
	}
	w.plainPod("vm")
	w.starts("vm")
	require.Equal(t, []string{testImage}, images())

	// No node runs the pod. This is the page of its disk, which is copied.
	const address = "127.0.92.60"
	listener, err := net.Listen("tcp", address+":9260")
	require.NoError(t, err)
	page, err := json.Marshal(status.Status{LUNs: []status.LUN{{Ready: true,
		CopyMode: string(libvirt.CopyClone), Copy: &status.Copy{Complete: true}}}})
	require.NoError(t, err)
	disk := httptest.NewUnstartedServer(http.HandlerFunc(
		func(res http.ResponseWriter, _ *http.Request) { _, _ = res.Write(page) }))
	disk.Listener.Close()
	disk.Listener = listener
	disk.Start()
	t.Cleanup(disk.Close)
	w.p.Kubectl(t, "-n", w.ns, "patch", "pod", "vm", "--subresource=status", "-p",
		`{"status": {"podIP": "`+address+`", "podIPs": [{"ip": "`+address+`"}]}}`)
	w.until("True: the disk needs its image no more, and new pods start without it", "get", "vmid",
		"vm", "-o", `jsonpath={range .status.conditions[?(@.type=="Hydrated")]}{.status}: `+
			`{.message}{end}`)

	w.p.Kubectl(t, "-n", w.ns, "delete", "pod", "vm", "--force", "--grace-period=0")
	w.plainPod("vm")
	w.starts("vm")
	require.Empty(t, images())
}
