package docs

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

// needed is a claim that a version is needed.
var needed = regexp.MustCompile(
	`\b(Go|Kubernetes|KubeVirt)\b[^.|]{0,20}\b(1\.\d+)( or| and)? (later|newer|above|higher)`)

// TestVersionsInOnePlace: docs/start.md says which versions are needed, and no other page does, so
// that there are never two answers. What Go builds it is also in go.mod, and what compiles the
// sources may be said where they are built.
func TestVersionsInOnePlace(t *testing.T) {
	const place = "docs/start.md"
	mod := rig.ReadFile(t, "../../go.mod")
	start := rig.ReadFile(t, "../../"+place)
	goVersion := regexp.MustCompile(`(?m)^go (1\.\d+)`).FindStringSubmatch(mod)[1]
	require.Contains(t, start, "| Go "+goVersion+" or later |")
	require.Contains(t, start, "| Kubernetes | ")
	require.Contains(t, start, "| KubeVirt | ")
	looked := 0
	for _, page := range trackedFiles(t, "*.md") {
		if page == place || strings.HasPrefix(page, "docs/decisions") ||
			strings.HasPrefix(page, "integration/evidence") || page == "CHANGELOG.md" {
			continue // what was so at some time
		}
		text := strings.Join(strings.Fields(rig.ReadFile(t, "../../"+page)), " ")
		for _, claim := range needed.FindAllStringSubmatch(text, -1) {
			looked++
			require.Equal(t, "Go "+goVersion, claim[1]+" "+claim[2],
				"%s: %q belongs into %s: link to it", page, claim[0], place)
		}
	}
	require.Positive(t, looked)
}

func TestVersionsInOnePlaceBites(t *testing.T) {
	for text, want := range map[string]bool{
		"Kubernetes 1.36 and later":           true,
		"Kubernetes has to be 1.24 or later.": true,
		"KubeVirt 1.7 or newer":               true,
		"Go 1.26 or later":                    true,
		"Kubernetes is later than we thought": false,
		"KubeVirt 1.9 has plugins":            false,
	} {
		require.Equal(t, want, needed.MatchString(text), text)
	}
}
