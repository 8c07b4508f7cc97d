#!/usr/bin/env bash
# Makes the Go code of the messages of KubeVirt's hooks. Needs protoc, of the package protobuf-compiler.
# With --check it changes nothing, and fails if the code is not fresh. Which protoc made it does not
# count.
set -euo pipefail
cd "$(dirname "$0")/.."

go=${GO:-go}
messages=kubevirt/hookpb/hook.proto
code=${messages%.proto}.pb.go
mkdir -p bin
# The generator has the version of the library that go.mod asks for.
"$go" build -o bin/protoc-gen-go google.golang.org/protobuf/cmd/protoc-gen-go
out=.
if [ "${1:-}" = --check ]; then
	out=$(mktemp -d)
	trap 'rm -rf "$out"' EXIT
fi
protoc --plugin=bin/protoc-gen-go --go_out="$out" --go_opt=module=kubevirt.io/disk "$messages"
if [ "$out" != . ]; then
	diff -I '^//.*protoc ' "$code" "$out/$code" || {
		echo "$code is not what $messages says: run scripts/generate-proto.sh" >&2
		exit 1
	}
fi
