package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWide(t *testing.T) {
	long := strings.Repeat("x", maxColumns-3)
	src := []string{
		"package p",
		"// " + long,               // 100 columns
		"// " + long + "x",         // 101
		"//\t" + long[:96],         // 100, with a tab to column 4
		"//\t" + long[:97],         // 101
		"// " + long[:96] + "ü",    // 100 characters, 101 bytes
		"var a = `" + long,         // a raw string is data
		long + "  " + long,         // and so are its other lines
		"end` // " + long,          // and its last one
		"var b = \"" + long + "\"", // 108
	}
	require.Equal(t, []int{3, 5, 10}, wide([]byte(strings.Join(src, "\n"))))
}
