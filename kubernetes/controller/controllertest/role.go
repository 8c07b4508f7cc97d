package controllertest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/template"

	"github.com/stretchr/testify/require"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Role is what the controller's account may do, by the chart with some settings. A controller that
// is tested with the role of the fewest settings that it needs works with all others, too: a
// setting only adds rights.
type Role struct {
	// Rules hold in the namespaces that the controller works in, and Cluster everywhere.
	Rules, Cluster []rbacv1.PolicyRule
}

// Settings of the chart that decide about rights. The zero value has everything turned off.
type Settings struct {
	Pets, Services, Snapshots, Exports, Volumes, Move, Fill, Signatures bool
	Namespaces                                                          []string
}

// values are the settings as the chart's values.
func (s Settings) values() map[string]any {
	without := []string{}
	for name, on := range map[string]bool{"pets": s.Pets, "services": s.Services,
		"snapshots": s.Snapshots, "exports": s.Exports} {
		if !on {
			without = append(without, name)
		}
	}
	policies := map[string]any{}
	if s.Signatures {
		policies["default"] = "default: deny"
	}
	return map[string]any{"without": without, "namespaces": s.Namespaces,
		"persistentVolumes": map[string]any{"create": s.Volumes},
		"localDisks":        map[string]any{"move": s.Move},
		"claims":            map[string]any{"fill": s.Fill},
		"signatures":        map[string]any{"policies": policies}}
}

// charts is the directory of the chart. A test runs in a directory of the project.
func charts() string {
	dir, _ := os.Getwd()
	for dir != filepath.Dir(dir) {
		chart := filepath.Join(dir, "kubernetes/chart")
		if _, err := os.Stat(chart); err == nil {
			return chart
		}
		dir = filepath.Dir(dir)
	}
	return "kubernetes/chart" // reading it says what is missing
}

// chartFiles is what the chart's templates call .Files.
type chartFiles struct{}

// Get returns a file of the chart.
func (chartFiles) Get(name string) (string, error) {
	text, err := os.ReadFile(filepath.Join(charts(), name))
	return string(text), err
}

// RoleOf renders the chart's roles as Helm does.
func RoleOf(t testing.TB, s Settings) Role {
	t.Helper()
	all := template.New("")
	all.Funcs(template.FuncMap{
		"include": func(name string, data any) (string, error) {
			var text strings.Builder
			err := all.ExecuteTemplate(&text, name, data)
			return text.String(), err
		},
		"has":   func(want string, list []string) bool { return slices.Contains(list, want) },
		"quote": strconv.Quote,
		"nindent": func(n int, text string) string {
			return "\n" + strings.Repeat(" ", n) +
				strings.ReplaceAll(text, "\n", "\n"+strings.Repeat(" ", n))
		},
		"toJson": func(v any) (string, error) {
			text, err := json.Marshal(v)
			return string(text), err
		},
	})
	_, err := all.ParseFiles(filepath.Join(charts(), "templates/_names.tpl"),
		filepath.Join(charts(), "templates/rbac.yaml"))
	require.NoError(t, err)
	var text bytes.Buffer
	require.NoError(t, all.ExecuteTemplate(&text, "rbac.yaml", map[string]any{
		"Values": s.values(), "Files": chartFiles{}, "Release": map[string]string{"Name": "x",
			"Namespace": "system"}, "Chart": map[string]string{"AppVersion": "1"}}))
	return roleIn(t, text.Bytes())
}

func roleIn(t testing.TB, manifest []byte) Role {
	t.Helper()
	var r Role
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(manifest), 4096)
	for {
		var o rbacv1.ClusterRole // or another kind, without rules
		if err := decoder.Decode(&o); err != nil {
			require.ErrorContains(t, err, "EOF")
			break
		}
		switch {
		case !strings.HasSuffix(o.Kind, "Role"):
		case o.Name == "kubevirt-disk-controller":
			r.Rules = o.Rules
		case o.Name == "kubevirt-disk-controller-cluster":
			r.Cluster = o.Rules
		}
	}
	require.NotEmpty(t, r.Rules)
	require.NotEmpty(t, r.Cluster)
	return r
}

func (r Role) allows(verb, group, resource, name string) bool {
	return slices.ContainsFunc(slices.Concat(r.Rules, r.Cluster), func(p rbacv1.PolicyRule) bool {
		return slices.Contains(p.Verbs, verb) && slices.Contains(p.APIGroups, group) &&
			slices.Contains(p.Resources, resource) &&
			(len(p.ResourceNames) == 0 || slices.Contains(p.ResourceNames, name))
	})
}

// Cache is a client that writes with this role, and reads what a cache with this role has.
func (r Role) Cache(of client.WithWatch) client.WithWatch {
	return r.client(of, []string{"list", "watch"}, []string{"list", "watch"})
}

// Live is a client that reads and writes with this role.
func (r Role) Live(of client.WithWatch) client.WithWatch {
	return r.client(of, []string{"get"}, []string{"list"})
}

func (r Role) client(of client.WithWatch, get, list []string) client.WithWatch {
	return intercept(of, func(q request, do func() error) error {
		kind, err := q.kind(of)
		if err != nil {
			return err
		}
		kind.Kind = strings.TrimSuffix(kind.Kind, "List")
		resource, _ := meta.UnsafeGuessKindToResource(kind)
		if q.sub != "" {
			resource.Resource += "/" + q.sub
		}
		verbs := []string{q.verb}
		switch q.verb {
		case "get":
			verbs = get
		case "list":
			verbs = list
		case "apply":
			verbs = []string{"patch"} // the object is made if it is not there
		}
		for _, verb := range verbs {
			if !r.allows(verb, resource.Group, resource.Resource, q.name) {
				return apierrors.NewForbidden(resource.GroupResource(), q.name, fmt.Errorf("the "+
					"controller's role does not allow %s", verb))
			}
		}
		return do()
	})
}

// Without is the role without the rules of the namespaces, as after one of them was deleted.
func (r Role) Without() Role { return Role{Cluster: r.Cluster} }

// String lists the rights, one in each line.
func (r Role) String() string {
	all := map[string]bool{}
	for _, p := range slices.Concat(r.Rules, r.Cluster) {
		for _, group := range p.APIGroups {
			for _, resource := range p.Resources {
				for _, verb := range p.Verbs {
					all[strings.TrimSpace(fmt.Sprint(verb, " ", resource, ".", group, " ",
						strings.Join(p.ResourceNames, " ")))] = true
				}
			}
		}
	}
	return strings.Join(slices.Sorted(maps.Keys(all)), "\n")
}
