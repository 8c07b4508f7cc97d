package pages

import (
	"html"
	"html/template"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestTemplateIsGos checks that the page is the same with html/template, for daemons in several
// states. Only what is escaped without need differs.
func TestTemplateIsGos(t *testing.T) {
	gos := template.Must(template.ParseFS(assets, "assets/page.html"))
	full, empty, many := newFake(), newFake(), newFake()
	const evil = `</td>"'><b>&amp;+` + "\u2028"
	full.status.LUNs[0].Image, full.status.Sessions[0].Alias = evil, evil
	full.status.Sessions[0].Alias = evil
	empty.luns(0)
	empty.status = Status{}
	many.luns(200)
	for _, f := range []*fake{full, empty, many} {
		page, _ := f.serve(t)
		page.Stop()
		page.Wait()
		for _, query := range []string{"", "?lun=2", "?lun=777", "?from=60"} {
			v := page.view(httptest.NewRequest("GET", "/"+query, nil))
			var ours, want strings.Builder
			require.NoError(t, page.html.render(&ours, reflect.ValueOf(v)))
			require.NoError(t, gos.Execute(&want, v))
			require.Equal(t, html.UnescapeString(want.String()),
				html.UnescapeString(ours.String()))
			require.Equal(t, strings.Count(want.String(), "<"), strings.Count(ours.String(), "<"))
		}
	}
}

func TestTemplateMistakes(t *testing.T) {
	for _, source := range []string{"{{.A", "{{end}}", "{{else}}", "{{if .A}}", "{{if A}}{{end}}",
		"{{if .A}}{{else}}", "{{range .A}}{{if .B}}{{end}}", "{{printf .A}}", "{{template}}"} {
		_, err := parseMarkup(source)
		require.Error(t, err, source)
	}
	for _, source := range []string{"{{.B}}", "{{.A}}{{range .B}}{{end}}",
		"{{with .A}}{{.C}}{{end}}"} {
		m, err := parseMarkup(source)
		require.NoError(t, err)
		var b strings.Builder
		require.Error(t, m.render(&b, reflect.ValueOf(struct{ A string }{"x"})), source)
	}
}
