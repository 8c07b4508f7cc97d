// Package hookpb has the messages between KubeVirt's launcher and its hooks. `make generate` makes
// it from hook.proto.
package hookpb
