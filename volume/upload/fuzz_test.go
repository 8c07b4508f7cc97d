package upload

import (
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzFields: a header field is read or refused, whatever it says.
func FuzzFields(f *testing.F) {
	f.Add("?1")
	f.Add("12;a=b")
	f.Add(digest256(nil))
	f.Add(digest512(nil) + ", md5=:AA==:, sha-256=:;x")
	f.Fuzz(func(t *testing.T, value string) {
		h := http.Header{"F": []string{value}}
		_, _ = boolField(h, "F")
		require.GreaterOrEqual(t, intField(h, "F"), int64(-1))
		found, err := digestField(h, "F")
		require.Equal(t, err == nil, len(found) > 0)
		for name, sum := range found {
			require.Len(t, sum, algorithms[name])
		}
	})
}

// FuzzRecord: a record that a crash has damaged is refused, or can be written again.
func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"version":1,"id":"x","length":-1}`))
	f.Add([]byte(`{"version":1,"id":"x","length":9,"offset":9,"format":"raw",` +
		`"sums":{"sha-256":"AA=="}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, recordName), text, 0o600))
		r, err := loadRecord(dir)
		if err != nil {
			return
		}
		_, _ = loadSummer(r.Sums)
		require.NoError(t, r.save(dir))
	})
}
