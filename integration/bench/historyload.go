package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// historySnapshots is how many snapshots a disk under load has.
const historySnapshots = 10

// measureLayers prints how fast a disk with snapshots is, beside one without.
func (s settings) measureLayers(ctx context.Context) error {
	all := []*nbdServer{s.layered(ctx, "kubevirt-disk", "", 0).nbdServer}
	for _, piece := range []string{"256k", "4k"} {
		all = append(all, s.layered(ctx, "pieces of "+piece, piece, historySnapshots).nbdServer)
	}
	loads, err := s.measureServers(ctx, all)
	if err != nil || len(loads) == 0 {
		return err
	}
	printAdded("A disk with ten snapshots, by NBD, fio, one connection over a Unix socket:", loads,
		all)
	return nil
}

// layered is our server of a persistent disk that its guest has filled. Before each snapshot the
// guest has written a twentieth of it, in pieces of a size all over it. Each measurement finds the
// disk as it was after the last snapshot, so that writes are the first ones in their place.
func (s settings) layered(ctx context.Context, name, piece string, snapshots int) *historian {
	h := &historian{&nbdServer{name: name, export: "disk.raw", binary: s.server}}
	h.serve = func(_ *nbdServer, images string) error {
		persistent := filepath.Join(h.dir, "persistent")
		if err := errors.Join(os.Mkdir(persistent, 0o755), h.begin(images,
			"--copy-mode=copy-on-write", "--persistent-dir="+persistent)); err != nil {
			return err
		}
		if _, err := h.write(ctx, time.Minute, wholeDisk, "--rw=write", "--bs=256k"); err != nil {
			return err
		}
		for i := range snapshots {
			if _, err := h.write(ctx, time.Minute, wholeDisk, "--rw=randwrite", "--bs="+piece,
				"--io_size="+strconv.Itoa(nbdSize/20)); err != nil {
				return err
			}
			if err := h.ask(ctx, "snapshot", "create", "1", snapshotName(i)); err != nil {
				return err
			}
		}
		settle()
		return nil
	}
	if snapshots > 0 {
		h.reset = func(ctx context.Context) error {
			return h.ask(ctx, "snapshot", "revert", "1", snapshotName(snapshots-1))
		}
	}
	return h
}

// wholeDisk has fio use all of a disk of NBD load.
var wholeDisk = "--size=" + strconv.Itoa(nbdSize)

func snapshotName(i int) string { return fmt.Sprintf("s%d", i) }
