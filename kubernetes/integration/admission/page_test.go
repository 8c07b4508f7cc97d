package admission

import (
	"cmp"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// TestPage runs the commands of docs/kubernetes.md, word for word, from nothing to a VM with a
// persistent disk. There is no node to run the controller that they install, so it runs here, with
// the rights that it would have there, and nobody waits for its Deployment.
func TestPage(t *testing.T) {
	p := plane.Get(t)
	namespace := p.Namespace(t)
	commands := plane.Commands(t, "kubernetes.md", "## From nothing to a VM with a persistent disk")
	require.Len(t, commands, 8)
	root := testtool.Must(plane.Root())(t)
	require.Equal(t, "make manifests", commands[0])
	const made = "bin/kubevirt-disk-controller.yaml" // by that
	for i, command := range commands[1:] {
		args := strings.Fields(command)
		require.Equal(t, "kubectl", args[0], command)
		for j, arg := range args {
			switch {
			case arg == made:
				args[j] = controllertest.Manifest(t)
			case j > 0 && args[j-1] == "-f":
				args[j] = root + "/" + arg
			}
		}
		args = args[1:]
		if args[0] == "rollout" {
			require.Equal(t, 1, i)
			p.Kubectl(t, "get", "-n", system, args[len(args)-2])
			p.ServeWebhook(t, system, account, server)
			controllers(t, p, system, []string{"pets"}) // as the manifest says
			continue
		}
		if i > 1 {
			args = append([]string{"--namespace", namespace}, args...)
		}
		out := p.Kubectl(t, args...)
		if i == len(commands)-2 {
			require.Contains(t, out, "my-vm")
			require.Contains(t, out, "true")
		}
	}
}

// controllers run as the controller's service account in a namespace, without the features that are
// turned off. They work in some other namespaces, or in all.
func controllers(t *testing.T, p *plane.Plane, system string, without []string,
	namespaces ...string) {
	t.Helper()
	p.Controllers(t, system, account, objects.Options{Server: server, Without: without,
		ClaimSize: resource.MustParse("20Gi"), Concurrency: 1}, namespaces...)
}

// TestPageWithoutController runs the commands for users who want no controller, under pod security
// `restricted`.
func TestPageWithoutController(t *testing.T) {
	p := plane.Get(t)
	namespace := p.Namespace(t)
	commands := plane.Commands(t, "kubernetes.md", "## Without the controller")
	require.NotEmpty(t, commands)
	root := testtool.Must(plane.Root())(t)
	for _, command := range commands {
		args := strings.Fields(command)
		require.Equal(t, "kubectl", args[0], command)
		for j := range args {
			if strings.HasSuffix(args[j], ".yaml") {
				args[j] = root + "/examples/kubernetes/" + args[j]
			}
		}
		p.Kubectl(t, append([]string{"--namespace", namespace}, args[1:]...)...)
	}
}

// TestTodaysKubeVirt follows the way with a PersistentVolume in docs/kubernetes.md. The claim of a
// VM gets the volume with the decoupled disk. In package integration, the kernel of a guest logs in
// with these fields.
func TestTodaysKubeVirt(t *testing.T) {
	p := plane.Get(t)
	root := testtool.Must(plane.Root())(t)
	for _, name := range []string{"secret.yaml", "decoupled.yaml", "volume.yaml"} {
		file := root + "/examples/kubernetes/" + name
		t.Cleanup(func() { p.Kubectl(t, "delete", "--wait=false", "-n", "default", "-f", file) })
		p.Kubectl(t, "apply", "-n", "default", "-f", file)
	}
	page := testtool.Must(os.ReadFile(root + "/docs/kubernetes.md"))(t)
	const name = "my-fedora-root"
	require.Contains(t, string(page), "persistentVolumeClaim: {claimName: "+name+"}")
	claim := &corev1.PersistentVolumeClaim{}
	eventually(t, "the claim is bound", func() bool {
		require.NoError(t, p.Client.Get(t.Context(),
			client.ObjectKey{Namespace: "default", Name: name}, claim))
		return claim.Status.Phase == corev1.ClaimBound
	})
	require.Equal(t, "my-fedora-disk", claim.Spec.VolumeName)
	require.Equal(t, corev1.PersistentVolumeBlock, *claim.Spec.VolumeMode)
}

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
