package rig

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/integration/objects"
)

// kubernetesExamples are the objects in the examples for Kubernetes, by their names.
type kubernetesExamples struct {
	Pods    map[string]*objects.PodTemplate // also those that other objects make
	Secrets map[string]map[string]string
	Volumes map[string]*guest.ISCSI
}

func ReadKubernetesExamples(t *testing.T) kubernetesExamples {
	t.Helper()
	all := kubernetesExamples{Pods: map[string]*objects.PodTemplate{},
		Secrets: map[string]map[string]string{}, Volumes: map[string]*guest.ISCSI{}}
	read, err := objects.Read("../../examples/kubernetes/*.yaml")
	require.NoError(t, err)
	for _, o := range read {
		name := o.Metadata.Name
		if pod := o.PodOf(); pod != nil {
			all.Pods[name] = pod
		}
		switch o.Kind {
		case "Secret":
			all.Secrets[name] = o.StringData
		case "PersistentVolume":
			all.Volumes[name] = o.Spec.ISCSI
		}
	}
	require.Len(t, all.Pods, 4)
	return all
}

// DiskContainer returns the container that serves the disk.
func DiskContainer(t *testing.T, pod *objects.PodTemplate) *objects.Container {
	t.Helper()
	c := pod.Spec.Container("disk")
	require.NotNil(t, c, "no container is named disk")
	return c
}

// HandlerMade has what handlers make of VMs and claims. The tests of the module kubernetes make it,
// and notice if it is not what they would make now.
const HandlerMade = "../../kubernetes/integration/examples/testdata/"
