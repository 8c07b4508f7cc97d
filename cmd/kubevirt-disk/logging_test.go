package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOnOneLine(t *testing.T) {
	for text, want := range map[string]string{
		"":                  "",
		"it hangs":          "it hangs",
		"first\nsecond\n":   "first; second",
		"2 files:\n  a\n b": "2 files: a; b",
		"2 errors:\n  one:\n\n    its reason\n  two": "2 errors: one: its reason; two",
	} {
		require.Equal(t, want, onOneLine(text))
	}
}
