// Package objects reads what tests without a cluster carry out of Kubernetes' manifests: what a pod
// says of its containers, and where a volume is. Whether a manifest is valid, the tests of the
// module kubernetes check with Kubernetes' own types.
package objects

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"go.yaml.in/yaml/v3"

	"kubevirt.io/disk/integration/guest"
)

// Object is an object of a manifest. Its fields are those that tests need, of all kinds.
type Object struct {
	Kind     string
	Metadata Meta
	Spec     struct {
		Pod      `yaml:",inline"`
		Template *PodTemplate
		ISCSI    *guest.ISCSI // of a PersistentVolume
	}
	StringData map[string]string `yaml:"stringData"` // of a Secret
}

// Meta is the metadata of an object.
type Meta struct {
	Name        string
	Annotations map[string]string
}

// PodTemplate is what a pod is made from.
type PodTemplate struct {
	Metadata Meta
	Spec     Pod
}

// Pod is the spec of a pod.
type Pod struct {
	InitContainers []Container `yaml:"initContainers"`
	Containers     []Container
	Volumes        []Volume
}

// Container is a container of a pod.
type Container struct {
	Name    string
	Args    []string
	EnvFrom []struct {
		SecretRef struct{ Name string } `yaml:"secretRef"`
	} `yaml:"envFrom"`
	Env []struct {
		Name, Value string
		ValueFrom   struct {
			SecretKeyRef struct{ Name, Key string } `yaml:"secretKeyRef"`
		} `yaml:"valueFrom"`
	}
	Ports []struct {
		Name          string
		ContainerPort int `yaml:"containerPort"`
	}
	StartupProbe    Probe `yaml:"startupProbe"`
	ReadinessProbe  Probe `yaml:"readinessProbe"`
	LivenessProbe   Probe `yaml:"livenessProbe"`
	SecurityContext struct {
		AllowPrivilegeEscalation *bool `yaml:"allowPrivilegeEscalation"`
		ReadOnlyRootFilesystem   bool  `yaml:"readOnlyRootFilesystem"`
		Capabilities             struct{ Drop []string }
	} `yaml:"securityContext"`
	VolumeMounts []struct {
		Name      string
		MountPath string `yaml:"mountPath"`
		ReadOnly  bool   `yaml:"readOnly"`
	} `yaml:"volumeMounts"`
}

// Probe asks a container by HTTP.
type Probe struct {
	HTTPGet struct{ Path, Port string } `yaml:"httpGet"`
}

// Volume is a volume of a pod. At most one of the fields beside the name is set.
type Volume struct {
	Name   string
	Secret *struct {
		SecretName string `yaml:"secretName"`
	}
	PersistentVolumeClaim *struct {
		ClaimName string `yaml:"claimName"`
	} `yaml:"persistentVolumeClaim"`
}

// Read returns the objects of files, whose names match a pattern of filepath.Glob.
func Read(pattern string) (all []Object, err error) {
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		return nil, errors.Join(err, fmt.Errorf("no file is called %s", pattern))
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for d := yaml.NewDecoder(bytes.NewReader(text)); ; {
			var o Object
			if err := d.Decode(&o); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			all = append(all, o)
		}
	}
	return all, nil
}

// PodOf returns the pod that an object is, or makes, with the metadata of the pod; nil: none.
func (o *Object) PodOf() *PodTemplate {
	switch {
	case o.Spec.Template != nil:
		return o.Spec.Template
	case o.Kind == "Pod":
		return &PodTemplate{Metadata: o.Metadata, Spec: o.Spec.Pod}
	}
	return nil
}

// Container returns a container of a pod by its name; nil: there is none.
func (p *Pod) Container(name string) *Container {
	for _, list := range [][]Container{p.InitContainers, p.Containers} {
		for i := range list {
			if list[i].Name == name {
				return &list[i]
			}
		}
	}
	return nil
}
