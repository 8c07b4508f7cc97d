#!/usr/bin/env bash
# Builds gotgt, a peer that we measure, from its own module (integration/peers/gotgt) into the given
# directory. The separate module keeps its dependencies out of ours.
set -euo pipefail

[ $# = 1 ] || {
	echo "usage: $0 DIRECTORY" >&2
	exit 2
}
mkdir -p "$1"
out=$(cd "$1" && pwd)/gotgt
cd "$(dirname "$0")/../integration/peers/gotgt"
CGO_ENABLED=0 "${GO:-go}" build -o "$out" github.com/gostor/gotgt
echo "$out"
