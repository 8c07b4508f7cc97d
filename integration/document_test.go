package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// document is a Markdown file with commands for people.
type document struct {
	text string
	// blocks maps a heading to its code blocks, which are shell commands or JSON. Blocks before the
	// first heading are under "".
	blocks map[string][]string
	unused map[string]bool // headings that no test has used
}

// readDocument reads a file. Its path is relative to the directory examples.
func readDocument(t *testing.T, name string) *document {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "examples", name))
	require.NoError(t, err)
	doc := &document{text: string(text), blocks: map[string][]string{}, unused: map[string]bool{}}
	heading, block, inside := "", "", false
	for line := range strings.Lines(doc.text) {
		switch {
		case line == "```sh\n" || line == "```json\n":
			block, inside = "", true
		case line == "```\n" && inside:
			doc.blocks[heading] = append(doc.blocks[heading], block)
			doc.unused[heading] = true
			inside = false
		case inside:
			block += line
		case strings.HasPrefix(line, "## "):
			heading = strings.TrimSpace(line[3:])
		}
	}
	require.False(t, inside, "a block of %s has no end", name)
	return doc
}

// section returns the n-th block of a section, from 0.
func (d *document) section(t *testing.T, heading string, n int) string {
	t.Helper()
	require.Greater(t, len(d.blocks[heading]), n, "the document has no such block under %q",
		heading)
	delete(d.unused, heading)
	return d.blocks[heading][n]
}
