package registry

import (
	"context"
	"encoding/json"
	"fmt"
	"path"
	"slices"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/registry/layer"
)

// squash puts the new layer directly above the oldest file of the chain. The layers of the versions
// in between are left out, so their content goes into the new layer, too. different are the
// clusters that differ from the old disk, and shared those that do not. squash moves the clusters
// of the versions in between from shared to different.
func (p *pusher) squash(ctx context.Context, different, shared clusters) error {
	o := p.old
	if len(o.chain) == 0 {
		return fmt.Errorf("%s: what its versions have is not known without an index: push the new "+
			"version as a whole, without --onto", p.opt.Onto.Image)
	}
	between, bottom := o.chain[:len(o.chain)-1], o.chain[len(o.chain)-1]
	for _, f := range between {
		if err := f.owns(ctx, bottom, different, p.planned[0].size); err != nil {
			return fmt.Errorf("%s: %w", p.opt.Onto.Image, err)
		}
		o.left = append(o.left, f.entry.Name)
	}
	for n := range different.All() {
		shared.Remove(n)
	}
	for name, below := range o.below {
		if slices.Contains(o.left, path.Join(layer.DiskDir, below)) &&
			!slices.Contains(o.left, path.Join(layer.DiskDir, name)) {
			return fmt.Errorf("%s: its file %q needs %q, too, so it cannot be squashed: leave "+
				"--squash out", p.opt.Onto.Image, name, below)
		}
	}
	o.backing = bottom.name()
	o.backingFormat = image.FormatRaw
	if bottom.content != nil {
		o.backingFormat = image.FormatQcow2
	}
	return p.base.leaveOut(o.left, bottom.entry.Layer, o.index)
}

// name is the name of a file in the directory of the disks.
func (o *oldFile) name() string { return o.entry.Name[len(layer.DiskDir)+1:] }

// owns adds the clusters of a disk of that size that the file does not take from the file below:
// those that it stores itself, and those behind its end, where bottom may have data.
func (o *oldFile) owns(ctx context.Context, bottom *oldFile, to clusters, size int64) error {
	if o.content == nil || o.content.Info().ExtendedL2 {
		return fmt.Errorf("what its file %q has is not known: push the new version as a whole, "+
			"without --onto", o.name())
	}
	cluster := o.content.Info().ClusterSize
	to.add(o.diskSize(), min(bottom.diskSize(), size))
	return o.content.Places(ctx, func(at qcow2.Place) bool {
		to.add(at.Guest, min(at.Guest+cluster, size))
		return true
	})
}

// diskSize is the size of the disk in a file. Bytes.
func (o *oldFile) diskSize() int64 {
	if o.content == nil {
		return o.Size()
	}
	return o.content.Info().VirtualSize
}

// leaveOut removes layers from the images: those of these files, and the indexes above the layer
// from, which were made with them. Layers below stay as they are.
func (b *baseImage) leaveOut(files []string, from string, x *layer.Index) error {
	layers := make(map[string]bool)
	for _, f := range x.Files {
		if slices.Contains(files, f.Name) {
			layers[f.Layer] = true
		}
	}
	for i := range b.platforms {
		platform := &b.platforms[i]
		out, above := make([]bool, len(platform.manifest.Layers)), false
		m := *platform.manifest
		m.Layers = nil
		for n, l := range platform.manifest.Layers {
			isIndex := l.Annotations[layer.AnnotationIndex] != "" ||
				l.Annotations[annotationRetired] != ""
			out[n] = layers[l.Digest.String()] || above && isIndex
			above = above || l.Digest.String() == from
			if !out[n] {
				m.Layers = append(m.Layers, l)
			}
		}
		config, err := reduceConfig(platform.config, out)
		if err != nil {
			return err
		}
		platform.manifest, platform.config = &m, config
	}
	return nil
}

// reduceConfig removes layers from a configuration, and keeps everything else in it.
func reduceConfig(text []byte, out []bool) ([]byte, error) {
	c, err := readConfig(text, len(out))
	if err != nil {
		return nil, err
	}
	kept := []string{}
	for i, id := range c.root.DiffIDs {
		if !out[i] {
			kept = append(kept, id)
		}
	}
	c.root.DiffIDs = kept
	at, left := 0, []json.RawMessage{}
	for _, line := range c.history {
		var one struct {
			Empty bool `json:"empty_layer"`
		}
		if err := json.Unmarshal(line, &one); err != nil {
			return nil, fmt.Errorf("its configuration cannot be read: %w", err)
		}
		if one.Empty || at >= len(out) || !out[at] {
			left = append(left, line)
		}
		if !one.Empty {
			at++
		}
	}
	if at == len(out) { // it is the history of exactly these layers
		c.history = left
	}
	return c.text()
}
