package server

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
)

func TestParseSpec(t *testing.T) {
	want := api.Spec{Size: 20 << 30, From: &api.Source{Image: "fedora.qcow2"},
		Copy: &api.Copy{Mode: "clone", UsageType: "fast"}}
	for _, c := range []struct{ kind, text string }{
		{"", "size: 20Gi\nfrom:\n  image: fedora.qcow2\ncopy: {mode: clone, usage-type: fast}\n"},
		{"application/x-www-form-urlencoded", "{size: 20Gi, from: {image: fedora.qcow2}, " +
			"copy: {mode: clone, usage-type: fast}}"},
		{"application/json; charset=utf-8", `{"size": 21474836480,
			"from": {"image": "fedora.qcow2"},
			"copy": {"mode": "clone", "usage-type": "fast"}}`},
	} {
		got := testtool.Must(parseSpec([]byte(c.text), c.kind))(t, c.text)
		require.Equal(t, want, got)
	}
	for _, text := range []string{"", " \n", "---\n", "# nothing\n", "{}"} {
		got := testtool.Must(parseSpec([]byte(text), ""))(t, text)
		require.True(t, got.IsZero())
	}
	for text, want := range map[string]string{
		"sizes: 1Gi":                  "unknown field \"sizes\": the fields are size, block-",
		"from: {file: a}":             "image, reference, url, digest, disk, snapsh",
		"size: [1]":                   "is not a size",
		"size: much":                  "is not a size",
		"from: fedora.qcow2":          "from: it is string",
		"size: 1Gi\nsize: 2Gi":        "already defined",
		"a: *x":                       "unknown anchor",
		"size: &a 1Gi\nfrom: *a":      "line 2: a value begins with *",
		strings.Repeat("a:\n", 20000): "more than 4096 values",
		strings.Repeat("a:\n", 4000):  `line 2: "a" is already defined`,
		"size: 1Gi\n---\nsize: 1Gi":   "more than one document",
		"[1, 2]":                      "array",
		"? [a]\n: b":                  "key",
	} {
		require.ErrorContains(t, testtool.Err(parseSpec([]byte(text), "")), want, text)
	}
	_, err := parseSpec([]byte("{} {}"), typeJSON)
	require.ErrorContains(t, err, "something follows")
	require.Error(t, testtool.Err(parseSpec([]byte("size: 1Gi"), typeJSON)))
}

func TestWantsJSON(t *testing.T) {
	for accept, want := range map[string]bool{
		"": false, "*/*": false, "application/yaml": false, "application/json": true,
		"application/json, */*;q=0.5": true, "application/json;q=0.1, application/yaml": false,
		"text/html, application/json;q=0.9, */*;q=0.8": false, "nonsense": false,
		"application/json;q=x": false,
	} {
		require.Equal(t, want, wantsJSON([]string{accept}), accept)
	}
}

func TestLoopbackHost(t *testing.T) {
	for host, want := range map[string]bool{"localhost": true, "localhost:8443": true,
		"127.0.0.1:1": true, "[::1]:8443": true, "127.9.9.9": true, "evil.example": false,
		"localhost.evil.example:80": false, "10.0.0.1:8443": false, "": false} {
		require.Equal(t, want, loopbackHost(host), host)
	}
}

// FuzzSpec: every request is understood or refused, quickly. What it means is the same when it is
// completed once more.
func FuzzSpec(f *testing.F) {
	f.Add([]byte("size: 20Gi\nfrom: {image: a}\ncopy: {mode: clone}\n"), false)
	f.Add([]byte(`{"size": 512, "pvc": {"claimname": "c"}}`), true)
	f.Add([]byte("a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nd: [*c,*c]\n"), false)
	f.Fuzz(func(t *testing.T, text []byte, json bool) {
		if len(text) > maxBody {
			return
		}
		kind := typeYAML
		if json {
			kind = typeJSON
		}
		spec, err := parseSpec(text, kind)
		if err != nil {
			require.False(t, strings.HasPrefix(err.Error(), "json: "), err.Error())
			return
		}
		r, err := spec.Resolved()
		if err != nil {
			return
		}
		again, err := r.Resolved()
		require.NoError(t, err)
		require.Empty(t, api.Differences(r, again))
		require.GreaterOrEqual(t, int64(r.Size), int64(0))
	})
}
