#!/usr/bin/env bash
# Builds gotgt, the measured peer, from its own module (integration/peers/gotgt) into the directory given. Its dependencies stay
# out of ours.
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
