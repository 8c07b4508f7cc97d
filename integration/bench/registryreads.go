package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/target/targettest"
)

// measureBootReads prints how long the reads of a recorded boot take, one after the other without
// pauses, depending on where the disk comes from: the waiting time of a guest whose computing costs
// nothing. It also prints how much other chunk sizes would fetch for these reads.
func (r *shop) measureBootReads(ctx context.Context) error {
	if r.images[bootImage] == "" {
		return nil
	}
	order, err := r.bootOrder(ctx)
	if err != nil {
		return err
	}
	blocks, err := blocksOf(order)
	if err != nil {
		return err
	}
	plain, err := r.push(bootImage, "1")
	if err != nil {
		return err
	}
	ordered, err := r.push(bootImage, "ordered", "--boot-order="+order)
	if err != nil {
		return err
	}
	streamed := func(ref string) func() (float64, error) {
		return func() (float64, error) {
			d, dir, err := r.stream(ref, nil)
			if err != nil {
				return 0, err
			}
			defer os.RemoveAll(dir)
			seconds, err := replay(d, blocks)
			return seconds, errors.Join(err, d.Kill())
		}
	}
	cases := []struct {
		name string
		run  func() (float64, error)
	}{
		{"a local file", func() (float64, error) {
			place, err := os.MkdirTemp(r.cache, "local-")
			if err != nil {
				return 0, err
			}
			defer os.RemoveAll(place)
			d, err := r.startOn(r.images[bootImage], place,
				map[string]string{"COPY_MODE": "copy-on-write"})
			if err != nil {
				return 0, err
			}
			seconds, err := replay(d, blocks)
			return seconds, errors.Join(err, d.Kill())
		}},
		{"streamed, cold", streamed(plain)},
		{"streamed, recorded order", streamed(ordered)},
	}
	out := table{head: []string{"disk", "the reads of a boot", "fetched"}}
	times, fetched := make([][]float64, len(cases)), make([][]float64, len(cases))
	for round := range r.rounds {
		for turn := range cases {
			i := (round + turn) % len(cases)
			before := r.far.fetched.Load()
			seconds, err := cases[i].run()
			if err != nil {
				return fmt.Errorf("%s: %w", cases[i].name, err)
			}
			times[i] = append(times[i], seconds)
			fetched[i] = append(fetched[i], float64(r.far.fetched.Load()-before))
		}
	}
	for i, c := range cases {
		out.add(c.name, fmt.Sprintf("%.2f s", median(times[i])), mib(median(fetched[i])))
	}
	fmt.Printf("The %d reads of 64 KiB of a recorded boot, one after the other:\n", len(blocks))
	out.print(os.Stdout)
	return r.printChunks(blocks)
}

// blocksOf returns the blocks of a recorded boot, in order.
func blocksOf(order string) (blocks []int64, err error) {
	f, err := os.Open(order)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	recorded, err := registry.ReadBootOrder(f)
	if err != nil {
		return nil, err
	}
	for _, run := range recorded.Disks[0].Blocks {
		for block := run.First; block < run.First+run.Count; block++ {
			blocks = append(blocks, block)
		}
	}
	return blocks, nil
}

// replay reads blocks one after the other, and returns how long that takes.
func replay(d *peers.Daemon, blocks []int64) (seconds float64, err error) {
	session, err := targettest.Login(mustResolve(d.Portals[0]),
		targettest.LoginOptions{Target: peers.DefaultTarget})
	if err != nil {
		return 0, err
	}
	defer session.Close()
	if _, err := session.ClearAttention(1); err != nil {
		return 0, err
	}
	const sectors = registry.BootBlock / 512
	begin := time.Now()
	for _, block := range blocks {
		answer, err := session.Do(targettest.Read10(1, uint32(block*sectors), sectors))
		if err == nil && answer.Status != 0 {
			err = fmt.Errorf("the read of block %d ended with status %#x", block, answer.Status)
		}
		if err != nil {
			return 0, err
		}
	}
	return time.Since(begin).Seconds(), nil
}

// noting is the file of an image. It records reads.
type noting struct {
	*os.File
	size  int64
	mu    sync.Mutex
	reads [][2]int64 // begin and end; guarded by mu
}

func (n *noting) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	n.mu.Lock()
	n.reads = append(n.reads, [2]int64{off, off + int64(len(p))})
	n.mu.Unlock()
	return n.File.ReadAt(p, off)
}

func (n *noting) Size() int64              { return n.size }
func (n *noting) Identity() image.Identity { return image.Identity{} }
func (n *noting) Parallel() int            { return 1 }
func (n *noting) WillRead(_, _ int64)      {}
func (n *noting) Check() error             { return nil }

func (n *noting) Extent(_, length int64) (disk.Extent, error) {
	return disk.Extent{Length: length, Data: true}, nil
}

// printChunks prints how much has to be fetched for a recorded boot, for several sizes of a fetch,
// compared with the bytes of the compressed file that its reads need.
func (r *shop) printChunks(recorded []int64) error {
	file, err := os.Open(r.images[bootImage])
	if err != nil {
		return err
	}
	info, err := file.Stat()
	if err != nil {
		return err
	}
	n := &noting{File: file, size: info.Size()}
	img, err := image.OpenSource(context.Background(), filepath.Base(file.Name()),
		func(context.Context, string) (image.Source, error) { return n, nil }, image.Options{})
	if err != nil {
		return err
	}
	defer img.Close()
	n.reads = nil
	p := make([]byte, registry.BootBlock)
	for _, block := range recorded {
		_, err := img.ReadAt(context.Background(), p, block*registry.BootBlock)
		if err != nil && err != io.EOF {
			return err
		}
	}
	needed := int64(0)
	out := table{head: []string{"at once", "chunks", "bytes", "to what is needed"}}
	for _, read := range n.reads {
		needed += read[1] - read[0]
	}
	for _, size := range []int64{64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20} {
		chunks := map[int64]bool{}
		for _, read := range n.reads {
			for chunk := read[0] / size; chunk*size < read[1]; chunk++ {
				chunks[chunk] = true
			}
		}
		total := int64(len(chunks)) * size
		out.add(fmt.Sprintf("%d KiB", size>>10), fmt.Sprint(len(chunks)), mib(float64(total)),
			ratio(float64(total), float64(needed)))
	}
	fmt.Printf("That boot reads %s of the disk, which are %s of the compressed file:\n",
		mib(float64(len(recorded)*registry.BootBlock)), mib(float64(needed)))
	out.print(os.Stdout)
	return nil
}
