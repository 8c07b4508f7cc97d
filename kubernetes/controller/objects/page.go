package objects

import (
	"bytes"
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
	"kubevirt.io/disk/status"
)

// DiskContainer is the container of a pod that serves a disk, or nil. In a server pod it is an
// ordinary container.
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

// PagesPort is the port of the pages of a pod's daemon: that of the first disk, unless the pod
// names another one.
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

// MaxPage limits the part of a daemon's answer that is read, in bytes. Answers have some KiB.
const MaxPage = 1 << 20

// maxValues is about how many values an answer may have. A value of two bytes may take hundreds of
// bytes of memory.
const maxValues = 16 << 10

// pageTimeout is how long to wait for an answer.
const pageTimeout = 5 * time.Second

// pages uses no proxy, and does not follow redirects, because an answer is not trusted.
var pages = &http.Client{
	Timeout:   pageTimeout,
	Transport: &http.Transport{DisableKeepAlives: true},
	CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	},
}

// ReadStatus reads the page /status of the daemon at an address, host:port.
func ReadStatus(ctx context.Context, address string) (*status.Status, error) {
	page := &status.Status{}
	if err := readPage(ctx, "http://"+address+"/status", page); err != nil {
		return nil, err
	}
	return page, nil
}

// ReadProgress reads the progress of the command at an address, host:port.
func ReadProgress(ctx context.Context, address string) (p status.Progress, err error) {
	err = readPage(ctx, "http://"+address+"/progress", &p)
	return p, err
}

func readPage(ctx context.Context, url string, into any) error {
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
	text, err := io.ReadAll(io.LimitReader(res.Body, MaxPage))
	if err == nil && bytes.Count(text, []byte(",")) > maxValues {
		err = fmt.Errorf("it has more than %d values", maxValues)
	}
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", url, err)
	}
	return nil
}
