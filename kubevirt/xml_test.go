package kubevirt

import (
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMemoryOfDomains: what a domain takes is in proportion to its length, whatever it is full of.
func TestMemoryOfDomains(t *testing.T) {
	const most = maxMessage - 100
	for name, piece := range map[string]string{"comments in text": "x<!---->",
		"comments": "<!---->", "text": "x", "instructions": "x<?a?>"} {
		domain := "<domain><devices/>" + strings.Repeat(piece, most/len(piece)) + "</domain>"
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := Edit(Call{Domain: []byte(domain), VMI: vmi()}, served("a"), "")
		runtime.ReadMemStats(&after)
		require.NoError(t, err, name)
		require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(256<<20), name)
	}
	for _, piece := range []string{"<a/>", "<a></a>", `<a b="" c=""/>`} {
		_, err := parse([]byte("<domain>" + strings.Repeat(piece, most/len(piece)) + "</domain>"))
		require.ErrorContains(t, err, "more than 65536 elements")
	}
}
