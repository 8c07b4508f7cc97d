#!/usr/bin/env bash
# Makes what is made from the API types: their deep copies and CRDs. Leaves a list of digests, by
# which a test knows without these tools whether somebody forgot to run this.
set -euo pipefail
cd "$(dirname "$0")/.."

go=${GO:-go}
controller_gen=$PWD/bin/controller-gen
"$go" build -C scripts/tools -o "$controller_gen" sigs.k8s.io/controller-tools/cmd/controller-gen

"$controller_gen" object paths=./kubernetes/api/...
rm -f kubernetes/config/crd/*.yaml
"$controller_gen" crd:headerFile=/dev/null paths=./kubernetes/api/... output:crd:dir=kubernetes/config/crd

LC_ALL=C sha256sum scripts/generate.sh scripts/tools/go.mod kubernetes/api/*/*.go \
	kubernetes/config/crd/*.yaml >kubernetes/config/generated.sha256
