package objects

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/vmdisk"
)

// DiskContainer is the container of a pod that serves a disk, or nil. Of a pod of its own it is a
// common one.
func DiskContainer(pod *corev1.PodSpec) *corev1.Container {
	for _, list := range [][]corev1.Container{pod.InitContainers, pod.Containers} {
		for i := range list {
			if list[i].Name == v1alpha1.DiskContainer {
				return &list[i]
			}
		}
	}
	return nil
}

// PagesPort is where the daemon of a pod has its pages: that of the first disk, unless the pod says
// another one.
func PagesPort(pod *corev1.PodSpec) int32 {
	if c := DiskContainer(pod); c != nil {
		for _, port := range c.Ports {
			if strings.HasPrefix(port.Name, "pages") {
				return port.ContainerPort
			}
		}
	}
	return vmdisk.FirstPagesPort
}

// PagesAddress is the address of these pages, host:port.
func PagesAddress(pod *corev1.Pod) string {
	return net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(int(PagesPort(&pod.Spec))))
}

// MaxPage is how much of an answer of a daemon is read, in bytes. It has some KiB.
const MaxPage = 1 << 20

// pageTimeout is how long an answer is waited for.
const pageTimeout = 5 * time.Second

// pages asks seldom, and not by way of a proxy. What answers is not trusted to send us elsewhere.
var pages = &http.Client{
	Timeout:   pageTimeout,
	Transport: &http.Transport{DisableKeepAlives: true},
	CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	},
}

// ReadStatus reads the page /status of the daemon at an address, host:port, into a value of the
// caller's. The page is that of package pages, which would bring the iSCSI server with it.
func ReadStatus(ctx context.Context, address string, into any) error {
	url := "http://" + address + "/status"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	res, err := pages.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", url, res.Status)
	}
	if err := json.NewDecoder(io.LimitReader(res.Body, MaxPage)).Decode(into); err != nil {
		return fmt.Errorf("%s: %w", url, err)
	}
	return nil
}
