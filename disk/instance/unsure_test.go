package instance

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/disktest/sourcetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
)

// unsureSource is a source that knows only at the end whether its content was right.
type unsureSource struct {
	image.Source
	unverified bool
	asked      atomic.Int32
	verdict    chan error
	differs    error // of Agree
	fails      error // of reads from 2 to 3 MiB
}

func (s *unsureSource) Unverified() bool { return s.unverified }

func (s *unsureSource) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if s.fails != nil && off < 3<<20 && off+int64(len(p)) > 2<<20 {
		return 0, s.fails
	}
	return s.Source.ReadAt(ctx, p, off)
}

func (s *unsureSource) Agree(context.Context) error { return s.differs }

func (s *unsureSource) Verify(ctx context.Context) error {
	s.asked.Add(1)
	select {
	case err := <-s.verdict:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func startUnsure(t *testing.T, s *unsureSource, opt Options) *Instance {
	t.Helper()
	s.Source = sourcetest.New(filetest.Sample(4<<20, 1), sourcetest.Options{Digest: "sha256:1"})
	s.verdict = make(chan error, 1)
	open := func(context.Context, string) (image.Source, error) { return s, nil }
	img := testtool.Must(image.OpenSource(t.Context(), "a.raw", open, image.Options{}))(t)
	require.Equal(t, s.unverified, img.Unverified())
	inst := testtool.Must(Open(t.Context(), img, opt))(t)
	t.Cleanup(func() { inst.Close() })
	return inst
}

// TestWrongContentFailsTheDisk condemns the disks of images whose content turns out to be wrong,
// even if the disk has already copied it, and completes none of them.
func TestWrongContentFailsTheDisk(t *testing.T) {
	for _, mode := range []CopyMode{CopyOnWrite, CopyOnRead, CopyClone} {
		t.Run(string(mode), func(t *testing.T) {
			s := &unsureSource{unverified: true}
			opt := Options{WorkDir: t.TempDir(), Mode: mode}
			inst := startUnsure(t, s, opt)
			p := make([]byte, 4096)
			filetest.Write(t, inst, p, 0)
			require.NoError(t, testtool.Err(inst.ReadAt(t.Context(), p, 1<<20)))
			s.verdict <- fmt.Errorf("%w: a test", disk.ErrWrongContent)
			testtool.Eventually(t, func() bool {
				_, err := inst.WriteAt(t.Context(), nil, 0)
				return err != nil
			}, "the disk fails")
			for _, call := range []func() error{
				func() error { _, err := inst.ReadAt(t.Context(), p, 0); return err },
				func() error { _, err := inst.WriteAt(t.Context(), p, 8192); return err },
				func() error { return inst.Disk.(disk.Discarder).Discard(t.Context(), 0, 4096) },
				func() error { return inst.Disk.(disk.Zeroer).Zero(t.Context(), 0, 4096) },
			} {
				err := call()
				require.ErrorIs(t, err, disk.ErrWrongContent)
				require.ErrorAs(t, err, new(*disk.MediumError))
				require.ErrorContains(t, err, "a test")
			}
			inst.copies.done.Wait()
			require.NoError(t, inst.Close())
			require.False(t, stateOf(t, inst).Complete)
		})
	}
}

// TestVerifiedBeforeItIsComplete: a copy is complete only after its content was verified. In other
// modes, content is not verified without need.
func TestVerifiedBeforeItIsComplete(t *testing.T) {
	for _, unverified := range []bool{true, false} {
		s := &unsureSource{unverified: unverified}
		inst := startUnsure(t, s, Options{WorkDir: t.TempDir(), Mode: CopyClone})
		testtool.Eventually(t, func() bool { return s.asked.Load() == 1 },
			"the content is verified")
		state := stateOf(t, inst)
		require.False(t, state.Complete)
		s.verdict <- nil
		inst.copies.done.Wait()
		state = stateOf(t, inst)
		require.True(t, state.Complete)
		require.NoError(t, inst.Close())

		s = &unsureSource{unverified: unverified}
		inst = startUnsure(t, s, Options{WorkDir: t.TempDir(), Mode: CopyOnWrite})
		if unverified {
			testtool.Eventually(t, func() bool { return s.asked.Load() == 1 },
				"the content is verified")
		} else {
			inst.copies.done.Wait()
			require.Zero(t, s.asked.Load())
		}
		require.NoError(t, inst.Close(), "which does not wait for the verdict")
	}
}

// TestImageThatContradictsItself fails the disks of an image of which a comparison, or a read of
// the guest or of the copy, has shown that it is wrong.
func TestImageThatContradictsItself(t *testing.T) {
	wrong := fmt.Errorf("%w: a test", disk.ErrWrongContent)
	for _, mode := range []CopyMode{CopyOnWrite, CopyOnRead, CopyClone} {
		for name, s := range map[string]*unsureSource{
			"compared": {differs: wrong},
			"read":     {fails: wrong},
		} {
			t.Run(string(mode)+", "+name, func(t *testing.T) {
				inst := startUnsure(t, s, Options{WorkDir: t.TempDir(), Mode: mode})
				s.verdict <- nil
				if s.fails != nil {
					_, err := inst.ReadAt(t.Context(), make([]byte, 512), 2<<20)
					require.ErrorIs(t, err, disk.ErrWrongContent)
				}
				testtool.Eventually(t, func() bool {
					_, err := inst.WriteAt(t.Context(), nil, 0)
					return errors.Is(err, disk.ErrWrongContent)
				}, "the disk fails")
				_, err := inst.ReadAt(t.Context(), make([]byte, 512), 0)
				require.ErrorIs(t, err, disk.ErrWrongContent)
				inst.copies.done.Wait()
				require.False(t, stateOf(t, inst).Complete)
			})
		}
	}
}

// TestCloneOfADiskThatIsNotVerified: what is made of a disk waits for the verdict on its image. A
// clone is complete only after that, and fails with the disk. If there is no verdict, because
// storage fails, nobody waits for it.
func TestCloneOfADiskThatIsNotVerified(t *testing.T) {
	for _, verdict := range []error{nil, fmt.Errorf("%w: a test", disk.ErrWrongContent),
		fmt.Errorf("%w: storage is broken", disk.ErrNotNow)} {
		wrong := errors.Is(verdict, disk.ErrWrongContent)
		s := &unsureSource{unverified: true}
		inst := startUnsure(t, s, Options{PersistentDir: t.TempDir(), Mode: CopyOnWrite})
		require.NoError(t, TakeSnapshot(t.Context(), "now", inst))
		snapshot := testtool.Must(inst.OpenSnapshot("now"))(t)
		img := testtool.Must(image.OpenSource(t.Context(), "clone.raw",
			func(context.Context, string) (image.Source, error) {
				return &Source{Disk: snapshot.Disk, ID: image.Identity{Digest: "snapshot:1"},
					Instance: inst}, nil
			}, image.Options{}))(t)
		clone, err := Open(t.Context(), img, Options{PersistentDir: t.TempDir(), Mode: CopyClone})
		require.NoError(t, err)
		testtool.Eventually(t, func() bool {
			copied, data := clone.copies.over.Copied()
			return copied == data
		}, "all is copied")
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, inst.Settled(ended), context.Canceled)
		state := stateOf(t, clone)
		require.False(t, state.Complete)
		s.verdict <- verdict
		switch err := inst.Settled(t.Context()); {
		case verdict == nil || wrong:
			require.ErrorIs(t, err, verdict)
		default:
			require.ErrorContains(t, err, "storage is broken")
			require.NotErrorIs(t, err, disk.ErrNotNow, "to ask again is of no use")
		}
		clone.copies.done.Wait()
		state = stateOf(t, clone)
		require.Equal(t, verdict == nil, state.Complete)
		_, err = clone.WriteAt(t.Context(), nil, 0)
		require.Equal(t, wrong, errors.Is(err, disk.ErrWrongContent))
		require.NoError(t, clone.Close())
	}
}
