package rig

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Document is a Markdown file with commands for people.
type Document struct {
	Text string
	// blocks maps a heading to its code blocks, which are shell commands or JSON. Blocks before the
	// first heading are under "".
	Blocks map[string][]string
	Unused map[string]bool // headings that no test has used
}

// ReadDocument reads a file. Its path is relative to the directory examples.
func ReadDocument(t *testing.T, name string) *Document {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "examples", name))
	require.NoError(t, err)
	doc := &Document{Text: string(text), Blocks: map[string][]string{}, Unused: map[string]bool{}}
	heading, block, inside := "", "", false
	for line := range strings.Lines(doc.Text) {
		switch {
		case line == "```sh\n" || line == "```json\n":
			block, inside = "", true
		case line == "```\n" && inside:
			doc.Blocks[heading] = append(doc.Blocks[heading], block)
			doc.Unused[heading] = true
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

// Section returns the n-th block of a section, from 0.
func (d *Document) Section(t *testing.T, heading string, n int) string {
	t.Helper()
	require.Greater(t, len(d.Blocks[heading]), n, "the document has no such block under %q",
		heading)
	delete(d.Unused, heading)
	return d.Blocks[heading][n]
}
