package pages

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"

	"kubevirt.io/disk/internal/words"
)

// none stands for an unknown value.
const none = "–"

// bytesText writes an amount of bytes with three digits, such as "1.25 GiB".
func bytesText(n float64) string { return words.Bytes(int64(n)) }

// digits writes a number with about three digits.
func digits(n float64) string {
	switch {
	case n < 9.995 && n != math.Trunc(n):
		return fmt.Sprintf("%.2f", n)
	case n < 99.95 && n != math.Trunc(n):
		return fmt.Sprintf("%.1f", n)
	}
	return fmt.Sprintf("%.0f", n)
}

// countText writes a whole number with commas between thousands.
func countText(n float64) string {
	s := strconv.FormatFloat(math.Round(n), 'f', 0, 64)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// latencyText writes the mean of a command's duration; 0: there was no command.
func latencyText(d time.Duration) string {
	switch {
	case d <= 0:
		return none
	case d < time.Millisecond:
		return digits(max(1, math.Round(float64(d)/1e3))) + " µs"
	case d < time.Second:
		return digits(float64(d)/1e6) + " ms"
	}
	return digits(d.Seconds()) + " s"
}

// durationText writes a duration in its largest unit, or in two if one is too rough.
func durationText(d time.Duration) string {
	switch s := int64(d.Round(time.Second).Seconds()); {
	case s < 60:
		return fmt.Sprintf("%d s", max(s, 0))
	case s < 60*60:
		return fmt.Sprintf("%d min", s/60)
	case s < 48*60*60:
		return fmt.Sprintf("%d h %d min", s/60/60, s/60%60)
	default:
		return fmt.Sprintf("%d days", s/60/60/24)
	}
}

// percentText writes a part of a whole. Only the whole is 100 %, and only nothing is 0 %.
func percentText(part, whole int64) string {
	switch {
	case whole <= 0 || part <= 0:
		return "0 %"
	case part >= whole:
		return "100 %"
	}
	percent := int64(float64(part) * 100 / float64(whole)) // an int64 may be too small for it
	return fmt.Sprintf("%d %%", min(99, max(1, percent)))
}

// plain makes a name from another source harmless for the eye, too: without characters that are
// invisible or reverse the text.
func plain(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, s)
}

// plains is plain for a list. Beyond a handful, it gives only their number.
func plains(names []string) string {
	const most = 5
	all := make([]string, 0, most+1)
	for i, name := range names {
		if i == most {
			all = append(all, fmt.Sprintf("%d more", len(names)-most))
			break
		}
		all = append(all, plain(name))
	}
	return strings.Join(all, ", ")
}
