package objects

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// TestFindsNoImpossibleName: there is no object with a name that no object can have. The client of
// the API server, which is not asked here, would find such a name an error.
func TestFindsNoImpossibleName(t *testing.T) {
	scheme := runtime.NewScheme()
	require.NoError(t, corev1.AddToScheme(scheme))
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Node"), meta.RESTScopeRoot)
	c, err := client.New(&rest.Config{Host: "127.0.0.1:1"}, client.Options{Scheme: scheme,
		Mapper: mapper})
	require.NoError(t, err)
	for _, name := range []string{"", "a/b", "..", "50%"} {
		require.Error(t, c.Get(t.Context(), client.ObjectKey{Name: name}, &corev1.Node{}))
		node, err := Find[corev1.Node](t.Context(), c, "node", client.ObjectKey{Name: name})
		require.NoError(t, err, name)
		require.Nil(t, node)
	}
}
