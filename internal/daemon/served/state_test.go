package served

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// movedDisk is one that another daemon serves for its machine now.
type movedDisk struct{ brokenDisk }

func (*movedDisk) WriteAt(context.Context, []byte, int64) (int, error) {
	return 0, fmt.Errorf("%w: %w", disk.ErrFailed, disk.ErrMoved)
}

// TestProbesActWhereItHelps: guests shall log in elsewhere when all disks have failed or moved, and
// not because one waits or has no space. Only a disk that has failed needs a new start.
func TestProbesActWhereItHelps(t *testing.T) {
	b := &brokenDisk{}
	d := serve(t, b, &movedDisk{})
	state := func(lun uint16) status.Condition {
		c, _ := d.condition(d.table.served()[lun-1], time.Now())
		return c
	}
	require.Equal(t, status.DiskReady, state(1).State)
	require.Equal(t, status.DiskMoved, state(2).State)
	require.Empty(t, d.Trouble(), "a disk that has moved is no trouble")
	require.NoError(t, d.Failure())

	in := d.inUse.At(1)
	in.Failed(status.TroubleNoSpace, serving.OpWrite, "iqn.a", "it is full", disk.ErrNoSpace,
		time.Now())
	require.Equal(t, status.DiskNoSpace, state(1).State)
	require.NotEmpty(t, state(1).WhatToDo)
	require.Len(t, d.Trouble(), 1)
	require.NoError(t, d.Unusable(), "a guest may log in")

	b.failed.Store(true)
	require.Equal(t, status.DiskFailed, state(1).State, "the worst counts")
	require.ErrorContains(t, d.Unusable(), "LUN 2")
	require.ErrorContains(t, d.Failure(), "LUN 1")
	require.NotContains(t, d.Failure().Error(), "LUN 2")
	b.failed.Store(false)
	require.NoError(t, d.Unusable())
}

// TestCopyingThatFails: people see that a part of the image cannot be copied, before a guest reads
// there.
func TestCopyingThatFails(t *testing.T) {
	d := serve(t, &brokenDisk{})
	s := d.table.served()[0]
	s.Progress = new(image.Progress)
	state := func() status.Condition {
		c, _ := d.condition(s, time.Now())
		return c
	}
	require.Equal(t, status.DiskReady, state().State)
	s.Progress.Missed(&disk.MediumError{Op: "read", Off: 512, Length: 512,
		Err: errors.New("input/output error")})
	c := state()
	require.Equal(t, status.DiskFailing, c.State)
	require.Equal(t, status.TroubleReadError, c.Kind)
	require.Contains(t, c.Reason, "a part of the image cannot be copied")
	require.Contains(t, c.Reason, "input/output error")
	require.NoError(t, d.Unusable(), "a guest may log in")
	s.Progress.Wait(true)
	require.Equal(t, status.DiskNoSpace, state().State, "the worst counts")
	s.Progress.Wait(false)
	s.Progress.Missed(nil)
	require.Equal(t, status.DiskReady, state().State)
}
