// Package words puts sizes and file names into messages for people. A file name is quoted, so that
// it is one word of one line whatever its characters are.
package words

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Bytes writes a size for people, with three digits, or four just below the next binary unit.
func Bytes(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, unit := float64(n)/1024, 0
	for v >= 1023.5 && unit < len(units)-1 {
		v /= 1024
		unit++
	}
	step := 1.0
	for step < 100 && v*step < 100 {
		step *= 10
	}
	return strconv.FormatFloat(math.Round(v*step)/step, 'f', -1, 64) + " " + units[unit:unit+1] +
		"iB"
}

// Name quotes a file name for a message. The builder of the image has chosen the name, which may
// contain spaces.
func Name(name string) string { return strconv.Quote(name) }

// Shell quotes a text, if necessary, to be one word of a command line that a person will copy.
// Control characters, which a terminal would obey, become the escapes of a shell.
func Shell(text string) string {
	hidden := func(r rune) bool { return !strconv.IsPrint(r) }
	if strings.ContainsFunc(text, hidden) || !utf8.ValidString(text) {
		escaped := strings.ReplaceAll(strconv.Quote(text), "'", `\'`)
		return "$'" + escaped[1:len(escaped)-1] + "'"
	}
	plain := strings.IndexFunc(text, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' ||
			strings.ContainsRune("._-+@%/,=", r))
	}) < 0
	if plain && text != "" && text[0] != '-' {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}
