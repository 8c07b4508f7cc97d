package hydration

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

// The limits of a question. An answer has some KiB.
const (
	askTimeout = 5 * time.Second
	maxAnswer  = 1 << 20
)

// status is what of the page /status says how far the disks are. The page is that of package pages,
// which would bring the iSCSI server with it.
type status struct {
	LUNs []struct {
		Ready    bool   `json:"ready"`
		CopyMode string `json:"copy_mode"`
		Copy     *struct {
			Complete bool `json:"complete"`
		} `json:"copy"`
	} `json:"luns"`
}

// copiesAll is the mode that copies the whole image.
const copiesAll = "clone"

// Pages returns a function that asks the page /status of a pod.
func Pages() func(ctx context.Context, address string) (Answer, error) {
	c := &http.Client{
		Timeout: askTimeout,
		// Pods are asked seldom, and not by way of a proxy. What answers is not trusted to send us
		// elsewhere.
		Transport: &http.Transport{DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse
		},
	}
	return func(ctx context.Context, address string) (Answer, error) { return ask(ctx, c, address) }
}

func ask(ctx context.Context, c *http.Client, address string) (Answer, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/status", nil)
	if err != nil {
		return 0, err
	}
	response, err := c.Do(req)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("http://%s/status: %s", address, response.Status)
	}
	var s status
	if err := json.NewDecoder(io.LimitReader(response.Body, maxAnswer)).Decode(&s); err != nil {
		return 0, fmt.Errorf("http://%s/status: %w", address, err)
	}
	return s.answer()
}

// answer is that of the disk that has furthest to go.
func (s status) answer() (Answer, error) {
	if len(s.LUNs) == 0 {
		return 0, ErrNotYet
	}
	all := Complete
	for _, lun := range s.LUNs {
		switch {
		case !lun.Ready:
			return 0, ErrNotYet
		case lun.Copy != nil && lun.Copy.Complete:
		case lun.CopyMode != copiesAll:
			all = Kept
		default:
			return Copying, nil
		}
	}
	return all, nil
}
