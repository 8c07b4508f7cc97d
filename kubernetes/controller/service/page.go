package service

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
)

const (
	// pageTimeout bounds how long a page is waited for.
	pageTimeout = 5 * time.Second
	// maxPage bounds what is read of one. Bytes.
	maxPage = 1 << 20
)

// status is what this package reads of the page /status of a daemon.
type status struct {
	Handover *struct {
		Asked string `json:"asked"`
		Done  string `json:"done"`
		Error string `json:"error"`
	} `json:"handover"`
	Sessions []struct {
		Initiator string `json:"initiator"`
	} `json:"sessions"`
}

// ask reads the page of the daemon in a pod.
func (r *Reconciler) ask(ctx context.Context, pod *corev1.Pod) (*status, error) {
	address := r.Options.Pages
	if address == nil {
		address = func(pod *corev1.Pod) string {
			return net.JoinHostPort(pod.Status.PodIP,
				strconv.Itoa(int(pagesPort(&pod.Spec))))
		}
	}
	ctx, cancel := context.WithTimeout(ctx, pageTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet,
		"http://"+address(pod)+"/status", nil)
	if err != nil {
		return nil, err
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse
		}}
	res, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answers %s", req.URL, res.Status)
	}
	var s status
	if err := json.NewDecoder(io.LimitReader(res.Body, maxPage)).Decode(&s); err != nil {
		return nil, fmt.Errorf("%s: %w", req.URL, err)
	}
	return &s, nil
}
