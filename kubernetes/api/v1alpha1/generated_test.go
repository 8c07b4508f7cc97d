package v1alpha1

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestGenerated checks by digests that neither a source of scripts/generate.sh nor one of its
// results has changed since it ran, and that no file came or went.
func TestGenerated(t *testing.T) {
	list := testtool.Must(os.Open("generated.sha256"))(t)
	defer list.Close()
	listed := map[string]bool{}
	for lines := bufio.NewScanner(list); lines.Scan(); {
		want, name, _ := strings.Cut(lines.Text(), "  ")
		listed[name] = true
		data, err := os.ReadFile(filepath.Join("../../..", name))
		require.NoError(t, err, "run `make generate`")
		require.Equal(t, want, fmt.Sprintf("%x", sha256.Sum256(data)),
			"%s is not what it was when `make generate` ran: run it", name)
	}
	for _, pattern := range []string{"kubernetes/api/*/*.go",
		"kubernetes/chart/files/crd/*.yaml"} {
		files := testtool.Must(filepath.Glob(filepath.Join("../../..", pattern)))(t)
		require.NotEmpty(t, files, pattern)
		for _, file := range files {
			name := testtool.Must(filepath.Rel("../../..", file))(t)
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			require.True(t, listed[name], "%s is new: run `make generate`", name)
		}
	}
}
