package registry

import (
	"context"
	"encoding/json"
	"fmt"
	"path"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/registry/internal/bounded"
	"kubevirt.io/disk/registry/layer"
)

// squash makes the new layer one on the oldest file of the chain: it gets all that the versions in
// between have, too, and their layers are left out. different has what is not as on the old disk,
// and gets what those versions have. That is taken out of shared, which is as on the old disk.
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
	for i := range shared {
		shared[i] &^= different[i]
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

// owns adds the clusters that are not those of the file below, as far as a disk of that size has
// them: what the file has itself, and what is behind its end, where bottom may have something.
func (o *oldFile) owns(ctx context.Context, bottom *oldFile, to clusters, size int64) error {
	if o.content == nil || o.content.Info().ExtendedL2 {
		return fmt.Errorf("what its file %q has is not known: push the new version as a whole, "+
			"without --onto", o.name())
	}
	cluster := o.content.Info().ClusterSize
	to.addRange(o.diskSize(), min(bottom.diskSize(), size))
	return o.content.Places(ctx, func(at qcow2.Place) bool {
		to.addRange(at.Guest, min(at.Guest+cluster, size))
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

// addRange adds the clusters that have some of the bytes from begin to end.
func (c clusters) addRange(begin, end int64) {
	for n := begin / qcow2.DeltaUnit; n*qcow2.DeltaUnit < end; n++ {
		c.add(n)
	}
}

// leaveOut takes layers out of the images: those of these files, and the indexes above the layer
// from, which were made with them. What lies below stays as it is.
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

// reduceConfig takes layers out of a configuration, and keeps everything else in it.
func reduceConfig(text []byte, out []bool) ([]byte, error) {
	bad := func(err error) ([]byte, error) {
		return nil, fmt.Errorf("the configuration of the old image cannot be read: %w", err)
	}
	var config, root map[string]json.RawMessage
	if err := bounded.Check(text); err != nil {
		return bad(err)
	}
	if err := json.Unmarshal(text, &config); err != nil {
		return bad(err)
	}
	if err := json.Unmarshal(config["rootfs"], &root); err != nil {
		return bad(err)
	}
	var ids []v1.Hash
	if err := json.Unmarshal(root["diff_ids"], &ids); err != nil {
		return bad(err)
	}
	if len(ids) != len(out) {
		return bad(fmt.Errorf("it names %d layers, and the manifest %d", len(ids), len(out)))
	}
	kept := []v1.Hash{}
	for i, id := range ids {
		if !out[i] {
			kept = append(kept, id)
		}
	}
	var err error
	if root["diff_ids"], err = json.Marshal(kept); err != nil {
		return nil, err
	}
	if config["rootfs"], err = json.Marshal(root); err != nil {
		return nil, err
	}
	if config["history"] == nil {
		return json.Marshal(config)
	}
	var history []json.RawMessage
	if err := json.Unmarshal(config["history"], &history); err != nil {
		return bad(err)
	}
	at, left := 0, []json.RawMessage{}
	for _, line := range history {
		var one struct {
			Empty bool `json:"empty_layer"`
		}
		if err := json.Unmarshal(line, &one); err != nil {
			return bad(err)
		}
		if one.Empty || at >= len(out) || !out[at] {
			left = append(left, line)
		}
		if !one.Empty {
			at++
		}
	}
	if at != len(out) {
		return json.Marshal(config) // it does not tell the story of these layers
	}
	if config["history"], err = json.Marshal(left); err != nil {
		return nil, err
	}
	return json.Marshal(config)
}

// deadWorth is how much must be hidden in layers before that is said. Bytes.
const deadWorth = 1 << 20

// sayDead says if most of what the layers below have is hidden by what is above.
func (p *pusher) sayDead(ctx context.Context, different clusters) error {
	o := p.old
	above := slices.Clone(different)
	var stored, dead [2]int64 // in between, and in the oldest one
	for i, f := range o.chain {
		which := 0
		if i == len(o.chain)-1 {
			which = 1
		} else if p.opt.Onto.Squash {
			continue // it is left out
		}
		s, d, err := f.hidden(ctx, above)
		if err != nil {
			return err
		}
		stored[which] += s
		dead[which] += d
		if which == 0 {
			if err := f.owns(ctx, f, above, p.planned[0].size); err != nil {
				return nil // nobody knows what it hides, and this is only for the warning
			}
		}
	}
	share := func(which int) string {
		return fmt.Sprintf("%d%% of the %d bytes", dead[which]*100/stored[which], stored[which])
	}
	switch {
	case dead[1] > stored[1]/2 && dead[1] > deadWorth:
		p.client.Warn(fmt.Sprintf("%s that the oldest layer of the disk has are hidden by later "+
			"versions: store it as a whole, without --onto, to leave that out", share(1)))
	case dead[0] > stored[0]/2 && dead[0] > deadWorth:
		p.client.Warn(fmt.Sprintf("%s in the layers between the oldest and the new one are hidden "+
			"by later versions: --squash leaves that out", share(0)))
	}
	if !p.opt.Onto.Squash && len(o.chain) == maxChain {
		p.client.Warn(fmt.Sprintf("the disk has %d backing files now, which is the most: push the "+
			"next version with --squash", maxChain))
	}
	return nil
}

// hidden returns how much of its disk a file stores, in bytes of the file, and how much of that is
// hidden by clusters above.
func (o *oldFile) hidden(ctx context.Context, above clusters) (stored, dead int64, err error) {
	if o.content == nil {
		for off := int64(0); off < o.Size() && ctx.Err() == nil; {
			n, zero := o.blob.run(off, min(o.Size()-off, qcow2.DeltaUnit))
			if !zero {
				stored += n
				if above.has(off / qcow2.DeltaUnit) {
					dead += n
				}
			}
			off += n
		}
		return stored, dead, ctx.Err()
	}
	size := o.content.Info().ClusterSize
	err = o.content.Places(ctx, func(at qcow2.Place) bool {
		stored += at.Length
		first, last := at.Guest/qcow2.DeltaUnit, (at.Guest+size-1)/qcow2.DeltaUnit
		covered := int64(0)
		for n := first; n <= last; n++ {
			if above.has(n) {
				covered++
			}
		}
		dead += at.Length * covered / (last - first + 1)
		return true
	})
	return stored, dead, err
}
