package api

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
)

func TestCheckName(t *testing.T) {
	for _, name := range []string{"a", "0", "vm1", "a-b.c_d", strings.Repeat("x", 128)} {
		require.NoError(t, CheckName(name), name)
	}
	for _, name := range []string{"", "A", "-a", "a-", ".a", "a.", "..", "a/b", "a " +
		"b", "ä", "a\x00b",
		strings.Repeat("x", 129)} {
		require.Error(t, CheckName(name), name)
	}
}

func TestSize(t *testing.T) {
	for text, want := range map[string]Size{`0`: 0, `512`: 512, `"1Ki"`: 1024, `"20Gi"`: 20 << 30,
		`"5M"`: 5e6, `"1k"`: 1000, `"8191Pi"`: 8191 << 50} {
		var s Size
		require.NoError(t, json.Unmarshal([]byte(text), &s), text)
		require.Equal(t, want, s)
	}
	for _, text := range []string{`-1`, `1.5`, `1e3`, `""`, `"Gi"`, `"-1Gi"`, `"1 Gi"`, `"8192Pi"`,
		`"99999999999999999999"`, `true`, `"1gi"`} {
		var s Size
		require.Error(t, json.Unmarshal([]byte(text), &s), text)
	}
	text, err := json.Marshal(Size(1 << 20))
	require.NoError(t, err)
	require.Equal(t, "1048576", string(text))
}

func TestResolved(t *testing.T) {
	image := &Source{Image: "fedora.qcow2"}
	for want, spec := range map[string]Spec{
		"":                         {Size: 1 << 20},
		"is not a multiple of 512": {Size: 1000},
		"that a disk can have":     {Size: MaxSize + 512, From: &Source{Upload: true}},
		"access-mode":              {AccessMode: "read-only"},
		"block-size: 1024":         {Size: 1 << 20, BlockSize: 1024},
		"is not a multiple of the": {Size: 1536, BlockSize: 4096},
		"one of image":             {From: &Source{Image: "a", Upload: true}},
		"from.disk":                {From: &Source{Image: "a", Disk: "b"}},
		"others use, too":          {From: image, Copy: &Copy{Mode: CopyNone}},
		"keeps using":              {Size: 512, Copy: &Copy{Mode: CopyOnWrite}},
		"copy.mode: \"move\"":      {From: image, Copy: &Copy{Mode: "move"}},
		"claimname":                {PVC: &Claim{}},
		"both say where":           {PVC: &Claim{"c"}, Copy: &Copy{UsageType: "fast"}},
	} {
		_, err := spec.Resolved()
		if want == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, want)
	}
}

// TestDifferences compares requests that mean the same, and requests that differ.
func TestDifferences(t *testing.T) {
	resolved := func(s Spec) Spec {
		r, err := s.Resolved()
		require.NoError(t, err)
		return r
	}
	plain := resolved(Spec{Size: 512})
	require.Empty(t, Differences(plain, resolved(Spec{Size: 1024, From: &Source{},
		BlockSize: 512, AccessMode: WriteExclusive, Copy: &Copy{Mode: CopyNone}})))
	long := resolved(Spec{Size: 4096, BlockSize: 4096})
	require.Empty(t, Differences(long, plain), "a request that says nothing of blocks")
	require.Equal(t, "512", Differences(long, resolved(Spec{BlockSize: 512}))[0].Asked)
	other := resolved(Spec{From: &Source{Reference: "r/n:t", Disk: "d"}, AccessMode: WriteShared,
		BlockSize: 4096, Copy: &Copy{Mode: CopyOnRead, UsageType: "fast"}})
	var fields []string
	for _, d := range Differences(plain, other) {
		fields = append(fields, d.Field)
	}
	require.Equal(t, []string{"from", "block-size", "access-mode", "copy.mode", "copy.usage-type"},
		fields)
	err := Differ("vm1", Differences(plain, other))
	require.Equal(t, 409, err.HTTPStatus())
	require.ErrorContains(t, err,
		`its from is nothing, and not the disk "d" of r/n:t, its block-size is 512, and not 4096`)
}

// TestSizeAdvice: a message about a size names one that a disk can have.
func TestSizeAdvice(t *testing.T) {
	require.EqualValues(t, image.DefaultMaxVirtualSize, MaxSize, "disks are opened by that limit")
	for size, advice := range map[Size]string{1: "such as 512", 513: "such as 1024",
		-5: "such as 512", math.MaxInt64: "(64Ti) that a disk can have", MaxSize: "",
		MaxSize - 1: "such as 70368744177664"} {
		err := size.check()
		if advice == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, advice)
	}
}
