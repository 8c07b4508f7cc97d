package adapt

import (
	"bytes"
	"compress/gzip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestKernelArch(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kernel")
	at := func(parts map[int]string) []byte {
		b := make([]byte, 5000)
		for offset, text := range parts {
			copy(b[offset:], text)
		}
		return b
	}
	arm := at(map[int]string{0: "MZ", 0x38: "ARM\x64"})
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, err := z.Write(arm)
	require.NoError(t, err)
	require.NoError(t, z.Close())
	for name, c := range map[string]struct {
		content []byte
		want    string
	}{
		"bzImage":  {at(map[int]string{0: "MZ", 0x202: "HdrS"}), "amd64"},
		"Image":    {arm, "arm64"},
		"Image.gz": {packed.Bytes(), "arm64"},
		"zboot": {at(map[int]string{0: "MZ", 0x3c: "\x40", 0x40: "PE\x00\x00\x64\xaa"}),
			"arm64"},
		"EFI": {at(map[int]string{0: "MZ", 0x3c: "\x40", 0x40: "PE\x00\x00\x64\x86"}),
			"amd64"},
		"ELF":          {at(map[int]string{0: "\x7fELF\x02\x01", 18: "\x3e"}), "amd64"},
		"ELF of arm64": {at(map[int]string{0: "\x7fELF\x02\x01", 18: "\xb7"}), "arm64"},
		"ELF of s390x": {at(map[int]string{0: "\x7fELF\x02\x02", 19: "\x16"}), ""},
		"far PE":       {at(map[int]string{0: "MZ", 0x3c: "\xff\xff\xff\xff"}), ""},
		"text":         {[]byte(strings.Repeat("no kernel ", 99)), ""},
		"short":        {[]byte("MZ"), ""}, "empty": {nil, ""},
	} {
		require.NoError(t, os.WriteFile(file, c.content, 0o600))
		arch, err := KernelArch(file)
		require.Equal(t, c.want, arch, name)
		if c.want == "" {
			require.ErrorIs(t, err, ErrNoKernel, name)
		}
	}
}
