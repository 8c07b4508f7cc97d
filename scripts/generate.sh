#!/usr/bin/env bash
# Generates the deep copies and the CRDs from the API types, and the one manifest from the chart. It
# leaves a list of digests, with which a test notices without these tools that somebody forgot to
# run this.
set -euo pipefail
cd "$(dirname "$0")/.."

go=${GO:-go}
chart=charts/kubevirt-disk
manifest=deploy/kubevirt-disk-controller.yaml

tool() { # tool NAME PACKAGE: builds it into bin/
	"$go" build -C scripts/tools -o "$PWD/bin/$1" "$2"
}
tool controller-gen sigs.k8s.io/controller-tools/cmd/controller-gen
tool helm helm.sh/helm/v4/cmd/helm

bin/controller-gen object paths=./kubernetes/api/...
rm -f kubernetes/config/crd/*.yaml $chart/files/crd/*.yaml
bin/controller-gen crd:headerFile=/dev/null paths=./kubernetes/api/... output:crd:dir=kubernetes/config/crd
cp kubernetes/config/crd/*.yaml $chart/files/crd/
cp kubernetes/config/{policy,webhook,annotations,alerts}.yaml $chart/files/

{
	cat <<-'TEXT'
		# kubevirt-disk-controller with all that it needs, in namespace kubevirt-disk-system:
		#
		#     kubectl apply --server-side --force-conflicts -f deploy/kubevirt-disk-controller.yaml
		#
		# Made from charts/kubevirt-disk by `make generate`. Settings are easier to change by the chart.
	TEXT
	bin/helm template kubevirt-disk $chart --namespace kubevirt-disk-system --set namespace.create=true |
		grep -v 'helm.sh/resource-policy'
} >$manifest

# The manifests that tests give to an API server.
charts=kubernetes/integration/admission/testdata
for values in "$charts"/*.values.yaml; do
	bin/helm template chart $chart --namespace chart-system --values "$values" >"${values%.values.yaml}.yaml"
done

find scripts/generate.sh scripts/tools/go.mod kubernetes/api kubernetes/config/crd kubernetes/config/*.yaml $chart $manifest $charts -type f \
	-not -name '*_test.go' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum >kubernetes/config/generated.sha256
