package console

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"go.uber.org/zap"
	"go.uber.org/zap/buffer"
	"go.uber.org/zap/zapcore"
	"golang.org/x/term"
)

// The formats of the log: for people, and for programs.
const (
	Text = "console"
	JSON = "json"
)

// Levels and Formats are the values of the log settings.
var (
	Levels  = []string{"debug", "info", "warn", "error"}
	Formats = []string{Text, JSON}
)

// LogConfig says what is logged, and how.
type LogConfig struct {
	Level  zapcore.Level
	Format string // "": console on a terminal, else JSON
	Chosen bool   // the level is not the default
}

// ParseLevel parses one of Levels.
func ParseLevel(text string) (zapcore.Level, error) {
	if !slices.Contains(Levels, text) {
		return 0, fmt.Errorf("%q is not a level: use debug, info, warn or error", text)
	}
	return zapcore.ParseLevel(text)
}

// ParseFormat parses one of Formats.
func ParseFormat(text string) (string, error) {
	if !slices.Contains(Formats, text) {
		return "", fmt.Errorf("%q is not a format: use console or json", text)
	}
	return text, nil
}

// Resolve chooses the format by the kind of output.
func (c LogConfig) Resolve(w io.Writer) LogConfig {
	if c.Format == "" {
		c.Format = JSON
		if IsTerminal(w) {
			c.Format = Text
		}
	}
	return c
}

// NewLogger makes a logger that writes to w. The level may change. Only the code that recovers
// panics logs a stack trace.
func NewLogger(c LogConfig, level zapcore.LevelEnabler, w io.Writer) *zap.Logger {
	c = c.Resolve(w)
	encoding := zap.NewProductionEncoderConfig()
	encoding.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	encoding.EncodeDuration = zapcore.StringDurationEncoder
	encoding.TimeKey = "time"
	encoder := zapcore.NewJSONEncoder(encoding)
	if c.Format == Text {
		encoder = newEncoder()
	}
	core := zapcore.NewCore(encoder, zapcore.Lock(zapcore.AddSync(w)), level)
	return zap.New(core, zap.ErrorOutput(zapcore.Lock(zapcore.AddSync(w))))
}

// ErrorField is the error that ended a command, for a log in JSON: there a line break is only "\n".
func ErrorField(err error) zap.Field { return zap.String("error", OnOneLine(err.Error())) }

// OnOneLine puts a message of several lines, such as a heading and its list, on one line.
func OnOneLine(text string) string {
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

// IsTerminal reports whether w is a terminal, where a person may read.
func IsTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// encoder writes log lines for a person: the time of day, the message, and its fields.
type encoder struct {
	*zapcore.MapObjectEncoder // of the logger itself
	pool                      buffer.Pool
}

func newEncoder() *encoder {
	return &encoder{zapcore.NewMapObjectEncoder(), buffer.NewPool()}
}

func (c *encoder) Clone() zapcore.Encoder {
	n := newEncoder()
	maps.Copy(n.Fields, c.Fields)
	return n
}

func (c *encoder) EncodeEntry(e zapcore.Entry, fields []zapcore.Field) (*buffer.Buffer, error) {
	var facts []string
	say := func(all map[string]any) {
		for _, key := range slices.Sorted(maps.Keys(all)) {
			facts = append(facts, fmt.Sprintf("%s %v", strings.ReplaceAll(key, "_", " "), all[key]))
		}
	}
	say(c.Fields)
	for _, f := range fields {
		one := zapcore.NewMapObjectEncoder()
		f.AddTo(one)
		delete(one.Fields, f.Key+"Verbose") // the same error with places in the code
		say(one.Fields)
	}
	line := c.pool.Get()
	line.AppendString(e.Time.Format("15:04:05  "))
	if e.Level != zapcore.InfoLevel {
		line.AppendString(e.Level.CapitalString() + "  ")
	}
	text := e.Message
	if len(facts) > 0 {
		text += " (" + strings.Join(facts, ", ") + ")"
	}
	line.AppendString(Harmless(OnOneLine(text)) + "\n")
	if e.Stack != "" {
		line.AppendString(e.Stack + "\n")
	}
	return line, nil
}
