package admission

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/config"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// TestPolicies: with the policies, the API server itself changes pods as package inject does.
func TestPolicies(t *testing.T) {
	p := plane.Get(t)
	namespace := begin(t, p)
	install(t, p, config.Policies(server))
	ready(t, p, namespace)
	t.Run("new", func(t *testing.T) { agree(t, p, namespace) })
	t.Run("changed", func(t *testing.T) { updates(t, p, namespace) })
	t.Run("our own objects", func(t *testing.T) { own(t, p, namespace) })
}

// TestPoliciesWithoutTypes: if the CRDs are removed before the policies, or do not exist yet, a pod
// that asks for a disk is refused, and any other pod is made.
func TestPoliciesWithoutTypes(t *testing.T) {
	p := plane.Get(t)
	namespace := p.Namespace(t)
	install(t, p, strings.ReplaceAll(config.Policies(server), "kind: VMIdentitySet", "kind: Gone"))
	var err error
	testtool.Within(t, patience, func() bool {
		_, err = dryRun(t.Context(), p, aPod(namespace, "fedora"))
		return err != nil && strings.Contains(err.Error(), "there is no VMIdentitySet")
	}, "the pod is refused: %v", func() any { return err })
	plain := aPod(namespace, "")
	plain.Annotations = nil
	for range 20 {
		_, err := dryRun(t.Context(), p, plain)
		require.NoError(t, err)
	}
}
