#!/usr/bin/env bash
# Makes the Go code of the messages of KubeVirt's hooks. Needs protoc, of the package protobuf-compiler.
set -euo pipefail
cd "$(dirname "$0")/.."

go=${GO:-go}
mkdir -p bin
# The generator has the version of the library that go.mod asks for.
"$go" build -o bin/protoc-gen-go google.golang.org/protobuf/cmd/protoc-gen-go
protoc --plugin=bin/protoc-gen-go --go_out=. --go_opt=module=kubevirt.io/disk kubernetes/hook/hookpb/hook.proto
