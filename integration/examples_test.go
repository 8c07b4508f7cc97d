package integration

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/integration/objects"
)

// kubernetesExamples are the objects in the examples for Kubernetes, by their names.
type kubernetesExamples struct {
	pods    map[string]*objects.PodTemplate // also those that other objects make
	secrets map[string]map[string]string
	volumes map[string]*guest.ISCSI
}

func readKubernetesExamples(t *testing.T) kubernetesExamples {
	t.Helper()
	all := kubernetesExamples{pods: map[string]*objects.PodTemplate{},
		secrets: map[string]map[string]string{}, volumes: map[string]*guest.ISCSI{}}
	read, err := objects.Read("../examples/kubernetes/*.yaml")
	require.NoError(t, err)
	for _, o := range read {
		name := o.Metadata.Name
		if pod := o.PodOf(); pod != nil {
			all.pods[name] = pod
		}
		switch o.Kind {
		case "Secret":
			all.secrets[name] = o.StringData
		case "PersistentVolume":
			all.volumes[name] = o.Spec.ISCSI
		}
	}
	require.Len(t, all.pods, 4)
	return all
}

// diskContainer returns the container that serves the disk.
func diskContainer(t *testing.T, pod *objects.PodTemplate) *objects.Container {
	t.Helper()
	c := pod.Spec.Container("disk")
	require.NotNil(t, c, "no container is named disk")
	return c
}

// handlerMade has what handlers make of VMs and claims. The tests of the module kubernetes make it,
// and notice if it is not what they would make now.
const handlerMade = "../kubernetes/integration/examples/testdata/"
