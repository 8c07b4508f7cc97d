package admission

import (
	"cmp"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// digestLeftOut is where a page leaves out a digest.
var digestLeftOut = regexp.MustCompile(`sha256:\.\.\.`)

// TestManifestsOfPages: the API server accepts each manifest of our types and of Kubernetes' own in
// the pages and in the examples, with its validation, without unknown fields, and under pod
// security `restricted`. KubeVirt's own objects are for `make test-kubevirt`, and for hook --check.
func TestManifestsOfPages(t *testing.T) {
	p := plane.Get(t)
	namespace := p.Namespace(t)
	root := testtool.Must(plane.Root())(t)
	pages := testtool.Must(filepath.Glob(root + "/docs/*.md"))(t)
	for _, folder := range []string{"kubevirt", "kubernetes", "registry", "container"} {
		manifests := testtool.Must(filepath.Glob(root + "/examples/" + folder + "/*.yaml"))(t)
		require.NotEmpty(t, manifests, folder)
		pages = append(pages, manifests...)
	}
	kinds := map[string]bool{}
	for _, file := range pages {
		text := testtool.Must(os.ReadFile(file))(t)
		blocks := []string{string(text)}
		if strings.HasSuffix(file, ".md") {
			blocks = yamlBlocks(string(text))
		}
		for _, block := range blocks {
			for document := range strings.SplitSeq(block, "\n---\n") {
				var is metav1.TypeMeta
				if yaml.Unmarshal([]byte(document), &is) != nil || is.APIVersion == "" ||
					strings.Contains(is.APIVersion, "kubevirt.io/") &&
						is.APIVersion != v1alpha1.GroupVersion.String() {
					continue
				}
				document = digestLeftOut.ReplaceAllString(document,
					"sha256:"+strings.Repeat("ab", 32))
				document = strings.ReplaceAll(document, "namespace: default",
					"namespace: "+namespace)
				out, err := p.TryKubectl(strings.NewReader(document), "apply", "-n", namespace,
					"--dry-run=server", "--validate=strict", "-f", "-")
				require.NoError(t, err, "%s:\n%s\n%s", file, document, out)
				require.NotContains(t, out, "would violate PodSecurity", "%s:\n%s", file, document)
				kinds[is.Kind] = true
			}
		}
	}
	for _, kind := range []string{"VMIdentity", "VMIdentitySet", "VMIdentitySnapshot", "VMPet",
		"VMImage", "PersistentVolumeClaim"} {
		require.True(t, kinds[kind], "no page has a %s", kind)
	}
}

// yamlBlocks are the blocks of a page that are YAML: those in fences, and those that are indented.
func yamlBlocks(page string) (blocks []string) {
	parts := strings.Split(page, "\n```")
	for i := 1; i < len(parts); i += 2 {
		if block, ok := strings.CutPrefix(parts[i], "yaml\n"); ok {
			blocks = append(blocks, block)
		}
	}
	indented := ""
	for line := range strings.Lines(page + "\n") {
		more, ok := strings.CutPrefix(line, "    ")
		if ok || line == "\n" && indented != "" {
			indented += cmp.Or(more, "\n")
			continue
		}
		if strings.HasPrefix(indented, "apiVersion:") {
			blocks = append(blocks, indented)
		}
		indented = ""
	}
	return blocks
}
