package registry

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"kubevirt.io/disk/registry/layer"
)

// typeArtifact is the type of artifacts with disks.
const typeArtifact = "application/vnd.kubevirt.disk"

// made is what is stored besides layers.
func (p *pusher) made() (*madeImages, error) {
	if p.opt.Artifact {
		return p.artifact()
	}
	return p.images()
}

// artifact makes the manifest of an artifact, as "oras push" does: no configuration, and a layer
// for each file with its name. The layer of the index comes last: clients of artifacts take the
// layers that have a name or a type they know, and leave others.
func (p *pusher) artifact() (*madeImages, error) {
	m := madeImage{configText: []byte("{}")}
	m.config = blobOf(m.configText, layer.MediaEmpty)
	ours := p.ours(true)
	var err error
	if m.text, err = json.Marshal(v1.Manifest{SchemaVersion: 2,
		MediaType: types.OCIManifestSchema1, ArtifactType: typeArtifact, Config: m.config,
		Layers: append(slices.Clone(ours[1:]), ours[0])}); err != nil {
		return nil, err
	}
	m.desc = blobOf(m.text, types.OCIManifestSchema1)
	return &madeImages{images: []madeImage{m}, top: m.desc, topText: m.text}, nil
}

// describe gives the layer of a file the type and the names by which clients of artifacts know it.
func (p *pusher) describe(desc *v1.Descriptor, name string) {
	stem := strings.TrimSuffix(name, path.Ext(name))
	desc.Annotations = map[string]string{layer.AnnotationTitle: name, layer.AnnotationDisk: stem}
	desc.MediaType = layer.MediaDisk + "raw"
	for _, f := range p.planned {
		if path.Base(f.name) == name {
			desc.Annotations[layer.AnnotationSize] = fmt.Sprint(f.size)
			if f.qcow2 {
				desc.MediaType = layer.MediaDisk + "qcow2"
			}
		}
	}
}
