package console

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"kubevirt.io/disk/internal/words"
)

// Print prints text for a person. If the text has to be read, Print waits until it is written.
// Otherwise a reader that has stopped reading does not delay the command for long.
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
func ShortSize(n int64) string { return words.Bytes(n) }

// WriteJSON prints a value for programs.
func WriteJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}
