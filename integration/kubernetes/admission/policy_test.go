package admission

import (
	"testing"

	"kubevirt.io/disk/integration/kubernetes/plane"
	"kubevirt.io/disk/kubernetes/config"
)

// TestPolicies: the API server itself does with pods what package inject says, by the policies.
func TestPolicies(t *testing.T) {
	p := plane.Get(t)
	namespace := begin(t, p)
	install(t, p, config.Policies(server))
	ready(t, p, namespace)
	t.Run("new", func(t *testing.T) { agree(t, p, namespace) })
	t.Run("changed", func(t *testing.T) { updates(t, p, namespace) })
}
