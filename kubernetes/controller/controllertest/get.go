package controllertest

import (
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// There reads an object, and says whether it exists.
func There(t testing.TB, c client.Reader, namespace, name string, o client.Object) bool {
	t.Helper()
	err := c.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, o)
	if apierrors.IsNotFound(err) {
		return false
	}
	require.NoError(t, err)
	return true
}

// Get reads an object into o. The object must exist.
func Get[T client.Object](t testing.TB, c client.Reader, namespace, name string, o T) T {
	t.Helper()
	require.True(t, There(t, c, namespace, name, o), "%T %s/%s", o, namespace, name)
	return o
}
