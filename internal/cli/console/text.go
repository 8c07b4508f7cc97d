package console

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Print prints text for a person. If the text has to be read, it waits until it is written.
// Otherwise a reader that has stopped reading does not hold up the command for long.
func Print(w io.Writer, text string, hasToBeRead bool) {
	printed := make(chan struct{})
	go func() {
		defer close(printed)
		_, _ = io.WriteString(w, text)
	}()
	if hasToBeRead {
		<-printed
		return
	}
	select {
	case <-printed:
	case <-time.After(queueTimeout):
	}
}

// Harmless escapes characters that cannot be printed, such as control sequences of a terminal. A
// message may contain names of images and answers of remote daemons.
func Harmless(message string) string {
	var b strings.Builder
	for i, r := range message {
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(message[i:], string(utf8.RuneError)):
			fmt.Fprintf(&b, `\x%02x`, message[i])
		case r == '\n' || unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
	}
	return b.String()
}

// OneLine makes a name fit into a line of progress.
func OneLine(name string) string { return strings.ReplaceAll(Harmless(name), "\n", `\n`) }

// Size prints a size for people, with the exact number.
func Size(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d bytes", n)
	}
	return fmt.Sprintf("%s (%d bytes)", ShortSize(n), n)
}

// ShortSize prints a size with three digits and a binary unit.
func ShortSize(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, unit := float64(n)/1024, 0
	for v >= 1023.5 && unit < len(units)-1 {
		v, unit = v/1024, unit+1
	}
	digits := 100.
	switch {
	case v >= 100:
		digits = 1
	case v >= 10:
		digits = 10
	}
	text := strconv.FormatFloat(math.Round(v*digits)/digits, 'f', -1, 64)
	return fmt.Sprintf("%s %ciB", text, units[unit])
}

// WriteJSON prints a value for programs.
func WriteJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}
