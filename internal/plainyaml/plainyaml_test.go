package plainyaml

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// bombs are texts of about n bytes that a plain decoder makes much of.
func bombs(n int) map[string]string {
	keys, indents := new(strings.Builder), new(strings.Builder)
	for i := 0; keys.Len() < n; i++ {
		fmt.Fprintf(keys, "k%x: \n", i)
	}
	for i := 0; indents.Len() < n; i++ {
		indents.WriteString(strings.Repeat(" ", i) + "a:\n")
	}
	text := strings.Repeat("x", n/8)
	aliases := func(of string, times int) string {
		return "[" + strings.Repeat("*"+of+",", times) + "]"
	}
	merges := "a: &a {x: 1}\n"
	for c := 'b'; c < 'z'; c++ {
		merges += fmt.Sprintf("%c: &%[1]c {<<: [*%c,*%[2]c,*%[2]c,*%[2]c]}\n", c, c-1)
	}
	return map[string]string{
		"a text repeated": fmt.Sprintf("a: &a %s\nb: &b %s\nc: &c %s\nd: %s\n", text,
			aliases("a", n/32), aliases("b", n/32), aliases("c", n/32)),
		"aliases of aliases": "a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nd: [*c,*c]\n",
		"an alias of itself": "&a [*a]",
		"aliases as keys":    "a: &a x\n? *a\n: 1\n",
		"merges":             merges,
		"a key repeated":     strings.Repeat("a:\n", n/3),
		"keys":               keys.String(),
		"flow keys":          "{" + strings.ReplaceAll(keys.String(), "\n", ",") + "}",
		"a list":             "[" + strings.Repeat("1,", n/2) + "1]",
		"lists":              strings.Repeat("[", n/2) + strings.Repeat("]", n/2),
		"lines":              strings.Repeat("-\n", n/2),
		"dashes":             strings.Repeat("- ", n/2) + "a",
		"questions":          strings.Repeat("? ", n/2) + "a",
		"mappings":           "[" + strings.Repeat("{},", n/3) + "1]",
		"pairs":              "[" + strings.Repeat("a: b,", n/5) + "1]",
		"nested pairs":       strings.Repeat("{a: ", n/4) + "1" + strings.Repeat("}", n/4),
		"anchors":            "[" + strings.Repeat("&a ,", n/4) + "1]",
		"tags":               "[" + strings.Repeat("! ,", n/3) + "1]",
		"indents":            indents.String(),
		"documents":          strings.Repeat("---\n", n/4),
	}
}

// TestWhatItTakes: no text makes a decoder take more than a small multiple of it, whether it is
// understood or refused.
func TestWhatItTakes(t *testing.T) {
	for _, size := range []int{64 << 10, 1 << 20} {
		for name, text := range bombs(size) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			var value any
			err := Decode([]byte(text), MaxValues, &value)
			runtime.ReadMemStats(&after)
			took := int64(after.TotalAlloc - before.TotalAlloc)
			require.Less(t, took, int64(64<<20), "%s of %d bytes: %v", name, size, err)
		}
	}
}

// TestRefused: each kind is refused with words that say what to do.
func TestRefused(t *testing.T) {
	for text, want := range map[string]string{
		"a: &a 1\nb: *a\n":            "line 2: a value begins with *",
		"a: &a {b: 1}\nc: {<<: *a}\n": "line 2: a value begins with *",
		"a: 1\nb: 2\na: 3\n":          `line 3: "a" is already defined at line 1`,
		"a: {b: 1, b: 2}":             `"b" is already defined`,
		"- {a: 1}\n- {a: 1, 'a': 2}":  `line 2: "a" is already defined at line 2`,
		"a: 1\n---\na: 2\n":           "more than one document",
		"a: 1\n---\n*b":               "more than one document",
		"[1, 2, 3, 4, 5, 6]":          "more than 5 values",
		"a: *b":                       "unknown anchor",
		"x: 1\n":                      "field x not found",
	} {
		var into struct {
			A, B, C any
		}
		most := 100
		if strings.HasPrefix(text, "[") {
			most = 5
		}
		require.ErrorContains(t, Decode([]byte(text), most, &into), want, text)
	}
	// More keys in one place than are compared with each other.
	keys := new(strings.Builder)
	for i := range maxKeys + 1 {
		fmt.Fprintf(keys, "k%d: 1\n", i)
	}
	require.ErrorContains(t, Decode([]byte(keys.String()), MaxValues, new(any)), "more than 1024")
}

func TestRead(t *testing.T) {
	type one struct {
		A string
		B []string
	}
	for text, want := range map[string]one{
		"":                                 {},
		"---\n":                            {},
		"# nothing\n":                      {},
		"a: x\nb: [y, \"*z\"]\n":           {"x", []string{"y", "*z"}},
		"a: &anchor x\n":                   {A: "x"},
		"a: |\n  -----BEGIN\n  a:b,c?[{\n": {A: "-----BEGIN\na:b,c?[{\n"},
	} {
		var got one
		require.NoError(t, Decode([]byte(text), MaxValues, &got), text)
		require.Equal(t, want, got, text)
	}
	require.Equal(t, "03260", testtool.Must(Parse([]byte("a: 03260"), 10))(t).Content[1].Value)
}
