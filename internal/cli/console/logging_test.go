package console

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

func TestOnOneLine(t *testing.T) {
	for text, want := range map[string]string{
		"":                  "",
		"it hangs":          "it hangs",
		"first\nsecond\n":   "first; second",
		"2 files:\n  a\n b": "2 files: a; b",
		"2 errors:\n  one:\n\n    its reason\n  two": "2 errors: one: its reason; two",
	} {
		require.Equal(t, want, OnOneLine(text))
	}
}

func TestLogFormats(t *testing.T) {
	var b bytes.Buffer
	require.Equal(t, JSON, LogConfig{}.Resolve(&b).Format, "a pipe gets JSON")
	NewLogger(LogConfig{}, zapcore.WarnLevel, &b).Info("quiet")
	require.Empty(t, b.String())
	NewLogger(LogConfig{}, zapcore.WarnLevel, &b).Warn("loud", zap.Error(errors.New("two\nlines")))
	require.Contains(t, b.String(), `"msg":"loud"`)
	require.Contains(t, b.String(), `"error":"two\nlines"`)
	b.Reset()
	log := NewLogger(LogConfig{Format: Text}, zapcore.InfoLevel, &b).With(zap.Int("lun", 1))
	log.Info("hello", zap.Strings("portals", []string{"a", "b"}), zap.Int("size_bytes", 512))
	log.Warn("loud", zap.Error(errors.New("two\nlines\x1b")))
	require.Regexp(t, `^..:..:..  hello \(lun 1, portals \[a b\], size bytes 512\)\n`+
		`..:..:..  WARN  loud \(lun 1, error two; lines\\x1b\)\n$`, b.String())
}
