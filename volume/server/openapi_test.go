package server

import (
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"kubevirt.io/disk/volume/api"
)

// TestOpenAPI: the document has all addresses, the fields of all types, and the codes. Every
// reference in it resolves.
func TestOpenAPI(t *testing.T) {
	var doc map[string]any
	require.NoError(t, yaml.Unmarshal(openAPI, &doc))
	require.Equal(t, "3.1.0", doc["openapi"])
	schemas := at(t, doc, "components", "schemas")
	for name, of := range map[string]any{"Spec": api.Spec{}, "Source": api.Source{},
		"Copy": api.Copy{}, "Claim": api.Claim{}, "Volume": api.Volume{}, "List": api.List{},
		"Snapshot": api.Snapshot{}, "Snapshots": api.Snapshots{},
		"Changes": api.Changes{},
		"Refusal": api.Error{}} {
		requireFields(t, at(t, schemas, name, "properties"), of)
	}
	volume := at(t, schemas, "Volume", "properties")
	requireFields(t, at(t, volume, "volume", "properties"), api.Info{})
	requireFields(t, at(t, volume, "volume", "properties", "upload", "properties"), api.Progress{})
	requireFields(t, at(t, volume, "iscsi", "properties"), api.ISCSI{})
	requireFields(t, at(t, volume, "iscsi", "properties", "host", "properties"), api.Host{})
	requireFields(t, at(t, schemas, "Refusal", "properties", "differs", "items", "properties"),
		api.Difference{})

	var follow func(value any)
	follow = func(value any) {
		switch v := value.(type) {
		case map[string]any:
			if ref, ok := v["$ref"].(string); ok {
				at(t, doc, strings.Split(strings.TrimPrefix(ref, "#/"), "/")...)
			}
			for _, one := range v {
				follow(one)
			}
		case []any:
			for _, one := range v {
				follow(one)
			}
		}
	}
	follow(doc)

	s := serve(t, Access{})
	for path, operations := range at(t, doc, "paths") {
		if strings.Contains(path, "/data") {
			continue // Options.Uploads
		}
		for method := range operations.(map[string]any) {
			if method == "description" || method == "parameters" {
				continue
			}
			status, body := ask(t, strings.ToUpper(method), "http://"+s.address+
				strings.ReplaceAll(path, "{name}", "vm1"), nil, nil)
			require.NotEqual(t, http.StatusMethodNotAllowed, status, path)
			require.NotContains(t, body, "404 page not found", path)
			require.Contains(t, at(t, operations.(map[string]any), method, "responses"),
				strconv.Itoa(status), "%s %s", method, path)
		}
	}
}

// at returns a part of a document.
func at(t *testing.T, doc map[string]any, path ...string) map[string]any {
	t.Helper()
	for _, name := range path {
		next, ok := doc[name].(map[string]any)
		require.True(t, ok, "there is no %s in %s", name, path)
		doc = next
	}
	return doc
}

// requireFields checks that a schema has the fields of a type, and no others.
func requireFields(t *testing.T, properties map[string]any, of any) {
	t.Helper()
	var want, have []string
	kind := reflect.TypeOf(of)
	for i := range kind.NumField() {
		name, _, _ := strings.Cut(kind.Field(i).Tag.Get("json"), ",")
		yamlName, _, _ := strings.Cut(kind.Field(i).Tag.Get("yaml"), ",")
		require.Equal(t, name, yamlName, "%s", kind)
		if name != "-" {
			want = append(want, name)
		}
	}
	for name := range properties {
		have = append(have, name)
	}
	require.ElementsMatch(t, want, have, "%s", kind)
}
