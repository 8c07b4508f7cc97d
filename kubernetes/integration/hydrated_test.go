package kubernetes

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/status"
)

// TestHydratedPodHasNoImage: with the manifest as it is, a pod that is made after its disk is
// `Hydrated` mounts no image, as the message of the condition says. What is wrong with the disk is
// in condition `Troubled` meanwhile, and in an event, until it works again.
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
	var state atomic.Pointer[status.Condition]
	state.Store(&status.Condition{State: status.DiskNoSpace, Reason: "the storage is full",
		Since: time.Now()})
	page(t, address, func(res http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(res).Encode(status.Status{LUNs: []status.LUN{{LUN: 1, Ready: true,
			Condition: *state.Load(), CopyMode: string(libvirt.CopyClone),
			Copy: &status.Copy{Complete: true}}}})
	})
	w.at("vm", address)
	w.until("True: the disk no longer needs its image, and new pods start without it", "get",
		"vmid", "vm", "-o", `jsonpath={range .status.conditions[?(@.type=="Hydrated")]}{.status}: `+
			`{.message}{end}`)
	troubled := []string{"get", "vmid", "vm", "-o",
		`jsonpath={range .status.conditions[?(@.type=="Troubled")]}{.status}: {.message}{end}`}
	w.until("the storage is full", troubled...)
	w.until("Warning DiskFull", "get", "events", "-o",
		`jsonpath={range .items[*]}{.type} {.reason}{"\n"}{end}`)
	state.Store(&status.Condition{State: status.DiskReady, Since: time.Now()})
	w.until("False: the disk works again", troubled...)

	w.p.Kubectl(t, "-n", w.ns, "delete", "pod", "vm", "--force", "--grace-period=0")
	w.plainPod("vm")
	w.starts("vm")
	require.Empty(t, images())
}

// page is that of a disk at an address.
func page(t *testing.T, address string, answer http.HandlerFunc) {
	t.Helper()
	listener := testtool.Must(net.Listen("tcp", address+":9260"))(t)
	disk := httptest.NewUnstartedServer(answer)
	disk.Listener.Close()
	disk.Listener = listener
	disk.Start()
	t.Cleanup(disk.Close)
}

// at gives a pod an address.
func (w *world) at(pod, address string) {
	w.t.Helper()
	w.p.Kubectl(w.t, "-n", w.ns, "patch", "pod", pod, "--subresource=status", "-p",
		`{"status": {"podIP": "`+address+`", "podIPs": [{"ip": "`+address+`"}]}}`)
}

// TestPageThatHangs: pods that do not answer do not keep the controller from asking others.
func TestPageThatHangs(t *testing.T) {
	w := newWorld(t)
	w.apply(set("set", ""))
	const address, pods = "127.0.92.61", 8
	var asked atomic.Int32
	page(t, address, func(_ http.ResponseWriter, req *http.Request) {
		asked.Add(1)
		defer asked.Add(-1)
		<-req.Context().Done()
	})
	for n := range pods {
		name := fmt.Sprintf("vm-%d", n)
		require.NoError(t, w.machine(name, name))
		w.starts(name)
	}
	require.Zero(t, w.c.terminate())
	for n := range pods {
		w.at(fmt.Sprintf("vm-%d", n), address)
	}
	w.c = w.controller(w.p.ServiceAccount(t, systemNamespace, account), "--concurrency=1")
	testtool.Within(t, timeout, func() bool { return asked.Load() == pods },
		"all are asked at once: %d", func() any { return asked.Load() })
}
