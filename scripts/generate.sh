#!/usr/bin/env bash
# Generates the deep copies and the CRDs of the chart from the API types. It leaves a list of digests,
# with which a test notices without these tools that somebody forgot to run this.
set -euo pipefail
cd "$(dirname "$0")/.."

types=./api/... # of the module kubernetes
crd=kubernetes/chart/files/crd
"${GO:-go}" build -C scripts/tools -o "$PWD/bin/controller-gen" sigs.k8s.io/controller-tools/cmd/controller-gen
(cd kubernetes && ../bin/controller-gen object paths=$types)
rm -f $crd/*.yaml
(cd kubernetes && ../bin/controller-gen crd:headerFile=/dev/null paths=$types "output:crd:dir=../$crd")

find scripts/generate.sh scripts/tools/go.mod kubernetes/api $crd -type f -not -name '*_test.go' -not -name '*.sha256' \
	-print0 | LC_ALL=C sort -z | xargs -0 sha256sum >kubernetes/api/v1alpha1/generated.sha256
