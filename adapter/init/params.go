package guestinit

import (
	"strconv"
	"strings"
	"time"

	"kubevirt.io/disk/adapter/machine"
)

// params are the settings for the init on the kernel's command line.
type params struct {
	serial   string
	hostname string
	tty      bool
	grace    *time.Duration // nil: not on the command line
	network  time.Duration  // how long the start waits for the network
}

// parseParams reads a command line of the kernel. It leaves out invalid settings, and returns
// warnings with their names.
func parseParams(line string) (p params, warnings []string) {
	p.network = machine.DefaultNetwork
	for _, word := range splitCommandLine(line) {
		key, value, _ := strings.Cut(word, "=")
		switch key {
		case machine.ParamSerial:
			p.serial = value
		case machine.ParamHostname:
			p.hostname = value
		case machine.ParamTTY:
			p.tty = value == "1"
		case machine.ParamGrace:
			grace := machine.DefaultGrace
			warnings = append(warnings, seconds(key, value, &grace)...)
			p.grace = &grace
		case machine.ParamNetwork:
			warnings = append(warnings, seconds(key, value, &p.network)...)
		}
	}
	return p, warnings
}

func seconds(key, value string, to *time.Duration) (warnings []string) {
	n, err := strconv.Atoi(value)
	if err != nil || n < 0 || n > machine.MaxSeconds {
		return []string{key + "=" + value + " is not a number of seconds up to a day: it counts " +
			"as " + strconv.Itoa(int(*to/time.Second))}
	}
	*to = time.Duration(n) * time.Second
	return nil
}

// splitCommandLine splits a command line at its spaces. As in the kernel, double quotes keep spaces
// in a value.
func splitCommandLine(line string) (words []string) {
	var word strings.Builder
	quoted := false
	for _, c := range strings.TrimSpace(line) + " " {
		switch {
		case c == '"':
			quoted = !quoted
		case (c == ' ' || c == '\n' || c == '\t') && !quoted:
			if word.Len() > 0 {
				words = append(words, word.String())
			}
			word.Reset()
		default:
			word.WriteRune(c)
		}
	}
	return words
}
