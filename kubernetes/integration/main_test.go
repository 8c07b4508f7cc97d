package kubernetes

import (
	"testing"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/kubernetes/controller"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

func TestMain(m *testing.M) { plane.Main(m) }

// clientOf makes a client that knows the types of the controllers.
func clientOf(config *rest.Config) (client.Client, error) {
	scheme, err := controller.Scheme()
	if err != nil {
		return nil, err
	}
	return client.New(config, client.Options{Scheme: scheme})
}
