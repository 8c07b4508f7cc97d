package controller

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRetry: every controller repeats failed attempts as objects.Working says, within a minute. The
// default of controller-runtime is a quarter of an hour.
func TestRetry(t *testing.T) {
	files, err := filepath.Glob("*/*.go")
	require.NoError(t, err)
	controllers := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		n := strings.Count(string(text), "ctrl.NewControllerManagedBy(")
		require.Equal(t, n, strings.Count(string(text), "WithOptions(objects.Working("),
			"%s: a controller without objects.Working", file)
		controllers += n
	}
	require.GreaterOrEqual(t, controllers, 8)
}
