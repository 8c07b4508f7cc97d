package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"go.uber.org/zap/buffer"
	"go.uber.org/zap/zapcore"
)

// console writes log lines for a person: the time of day, the message, and what belongs to it.
type console struct {
	*zapcore.MapObjectEncoder // of the logger itself
	pool                      buffer.Pool
}

func newConsole() *console {
	return &console{zapcore.NewMapObjectEncoder(), buffer.NewPool()}
}

func (c *console) Clone() zapcore.Encoder {
	n := newConsole()
	maps.Copy(n.Fields, c.Fields)
	return n
}

func (c *console) EncodeEntry(e zapcore.Entry, fields []zapcore.Field) (*buffer.Buffer, error) {
	var facts []string
	say := func(all map[string]any) {
		for _, key := range slices.Sorted(maps.Keys(all)) {
			facts = append(facts, fmt.Sprintf("%s %v", strings.ReplaceAll(key, "_", " "),
				all[key]))
		}
	}
	say(c.Fields)
	for _, f := range fields {
		one := zapcore.NewMapObjectEncoder()
		f.AddTo(one)
		delete(one.Fields, f.Key+"Verbose") // the same error with the places in the code
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
	line.AppendString(harmless(onOneLine(text)) + "\n")
	if e.Stack != "" {
		line.AppendString(e.Stack + "\n")
	}
	return line, nil
}
