package hydration

import (
	"context"

	"kubevirt.io/disk/kubernetes/controller/objects"
)

// status is the part of the page /status that says how far the disks are.
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

// ask reads the page /status of a pod.
func ask(ctx context.Context, address string) (Answer, error) {
	var s status
	if err := objects.ReadStatus(ctx, address, &s); err != nil {
		return 0, err
	}
	return s.answer()
}

// answer is the answer about the disk with the most left to copy.
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
