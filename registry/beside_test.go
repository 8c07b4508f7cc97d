package registry

import (
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/registry/transport"
)

// TestArtifactWithTexts: what a publisher puts beside a disk is no disk, wherever it lies.
func TestArtifactWithTexts(t *testing.T) {
	raw := noise(92, 1<<20)
	for name, content := range map[string][]byte{"a.qcow2": qcow2Of(t, raw), "a.raw": raw,
		"a.raw.gz": gzipped(t, raw)} {
		t.Run(name, func(t *testing.T) {
			s := store{}
			var layers []v1.Descriptor
			add := func(name string, content []byte) {
				layers = append(layers, orasLayer(s, name, content))
			}
			add("LICENSE", []byte("do what you like\n"))
			add(name, content)
			add("README.md", []byte("# read me\n"))
			add("a.sig", noise(93, 512))
			ref := layoutOf(t, s, artifactOf(t, s, layers...))
			c := newClient(t, transport.Options{})
			brings(t, c, ref, PullOptions{}, raw)
			done, _, err := c.Pull(t.Context(), ref, t.TempDir(), PullOptions{})
			require.NoError(t, err)
			require.Len(t, done, 1)
			if name == "a.raw.gz" {
				return // the cache gets it by the same way
			}
			st := newStreaming(t, c, t.TempDir(), t.TempDir())
			st.opt.WhenComplete = true
			require.Equal(t, []string{name}, namesOfDisks(st.open(t, ref).Disks()))
		})
	}
	// Alone, it was meant to be a disk, and the error says why it is none.
	s := store{}
	_, err := pull(t, layoutOf(t, s, artifactOf(t, s, orasLayer(s, "README.md",
		[]byte("# read me\n")))), PullOptions{})
	require.ErrorContains(t, err, "README.md")
}
