package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/term"
)

const (
	logConsole = "console"
	logJSON    = "json"
)

// The values of the log settings.
var (
	logLevels  = []string{"debug", "info", "warn", "error"}
	logFormats = []string{logConsole, logJSON}
)

// logConfig says what is logged, and how.
type logConfig struct {
	level  zapcore.Level
	format string // "": console on a terminal, else JSON
	chosen bool   // the level is not the default
}

func parseLogLevel(text string) (zapcore.Level, error) {
	if !slices.Contains(logLevels, text) {
		return 0, fmt.Errorf("%q is not a level: use debug, info, warn or error", text)
	}
	return zapcore.ParseLevel(text)
}

func parseLogFormat(text string) (string, error) {
	if !slices.Contains(logFormats, text) {
		return "", fmt.Errorf("%q is not a format: use console or json", text)
	}
	return text, nil
}

// resolve chooses the format by the kind of output.
func (c logConfig) resolve(w io.Writer) logConfig {
	if c.format == "" {
		c.format = logJSON
		if isTerminal(w) {
			c.format = logConsole
		}
	}
	return c
}

// newLogger makes a logger that writes to w. The level may change. Only the place that recovers
// panics logs a stack trace.
func newLogger(c logConfig, level zapcore.LevelEnabler, w io.Writer) *zap.Logger {
	c = c.resolve(w)
	encoding := zap.NewProductionEncoderConfig()
	encoding.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	encoding.EncodeDuration = zapcore.StringDurationEncoder
	encoding.TimeKey = "time"
	encoder := zapcore.NewJSONEncoder(encoding)
	if c.format == logConsole {
		encoder = newConsole()
	}
	core := zapcore.NewCore(encoder, zapcore.Lock(zapcore.AddSync(w)), level)
	return zap.New(core, zap.ErrorOutput(zapcore.Lock(zapcore.AddSync(w))))
}

// errorField is the error that ended a command, for a log in JSON: there a line break is only "\n".
func errorField(err error) zap.Field { return zap.String("error", onOneLine(err.Error())) }

// onOneLine puts a message of several lines, such as a heading and its list, on one line.
func onOneLine(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		switch {
		case line == "":
			continue
		case b.Len() == 0:
		case strings.HasSuffix(b.String(), ":"):
			b.WriteString(" ")
		default:
			b.WriteString("; ")
		}
		b.WriteString(line)
	}
	return b.String()
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
