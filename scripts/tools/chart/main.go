// Command chart prints the objects of the chart, rendered by the library of Helm, as one YAML file.
package main

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"helm.sh/helm/v4/pkg/strvals"
)

func main() {
	var set []string
	directory := flag.String("chart", "../../kubernetes/chart", "`directory` of the chart")
	namespace := flag.String("namespace", "kubevirt-disk-system", "of the controller")
	file := flag.String("values", "", "`file` with values, in YAML")
	keep := flag.String("keep", "", "`file` that was printed before, of which the certificate of "+
		"the webhook is kept, if it is there")
	manifest := flag.Bool("manifest", false, "for kubectl apply: without the annotations of Helm")
	flag.Func("set", "`KEY=VALUE`: a value of the chart, can be repeated", func(s string) error {
		set = append(set, s)
		return nil
	})
	flag.Parse()
	text, err := render(*directory, *namespace, *file, *keep, set)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for line := range strings.Lines(text) {
		if !*manifest || !strings.Contains(line, "helm.sh/resource-policy") {
			fmt.Print(line)
		}
	}
}

func render(directory, namespace, file, keep string, set []string) (string, error) {
	chart, err := loader.Load(directory)
	if err != nil {
		return "", err
	}
	values := common.Values{}
	if file != "" {
		if values, err = common.ReadValuesFile(file); err != nil {
			return "", err
		}
	}
	for _, s := range set {
		if err := strvals.ParseInto(s, values); err != nil {
			return "", err
		}
	}
	if err := keepCertificate(values, keep); err != nil {
		return "", err
	}
	all, err := util.ToRenderValues(chart, values, common.ReleaseOptions{Name: chart.Name(),
		Namespace: namespace, IsInstall: true}, common.DefaultCapabilities)
	if err != nil {
		return "", err
	}
	files, err := engine.Render(chart, all)
	if err != nil {
		return "", err
	}
	// The namespace and the types come before their objects.
	first := []string{"namespace.yaml", "crds.yaml", "rbac.yaml"}
	var names []string
	for name := range files {
		names = append(names, name)
	}
	place := func(name string) int {
		i := slices.IndexFunc(first, func(f string) bool { return strings.HasSuffix(name, "/"+f) })
		return (i + len(first) + 1) % (len(first) + 1)
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(place(a)-place(b), strings.Compare(a, b))
	})
	var text strings.Builder
	for _, name := range names {
		if strings.HasSuffix(name, ".tpl") {
			continue
		}
		for document := range strings.SplitSeq("\n"+files[name], "\n---\n") {
			if strings.TrimSpace(document) != "" {
				fmt.Fprintf(&text, "---\n# Source: %s\n%s\n", name, strings.Trim(document, "\n"))
			}
		}
	}
	return text.String(), nil
}

// keepCertificate sets the certificate of the webhook to that of a file that was printed before.
// The replicas that run go on with it while the new file is applied.
func keepCertificate(values common.Values, file string) error {
	before, err := os.ReadFile(file)
	if err != nil {
		return nil // the first time
	}
	for document := range strings.SplitSeq(string(before), "\n---\n") {
		if !strings.Contains(document, "\nkind: Secret\n") {
			continue
		}
		secret, err := common.ReadValues([]byte(document))
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		values["webhook"] = map[string]any{"certificate": secret["data"]}
	}
	return nil
}
