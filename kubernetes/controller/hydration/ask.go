package hydration

import (
	"context"

	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/status"
)

// ask reads the page /status of a pod.
func ask(ctx context.Context, address string) (Answer, error) {
	page, err := objects.ReadStatus(ctx, address)
	if err != nil {
		return 0, err
	}
	return answer(page.LUNs)
}

// answer is the answer about the disk with the most left to copy.
func answer(luns []status.LUN) (Answer, error) {
	if len(luns) == 0 {
		return 0, ErrNotYet
	}
	all := Complete
	for _, lun := range luns {
		switch {
		case !lun.Ready:
			return 0, ErrNotYet
		case lun.Copy != nil && lun.Copy.Complete:
		case lun.CopyMode != string(libvirt.CopyClone):
			all = Kept
		default:
			return Copying, nil
		}
	}
	return all, nil
}
