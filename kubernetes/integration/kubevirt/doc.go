// Package kubevirt has the tests with a whole KubeVirt: its operator, unmodified, installs it on
// the nodes of kubernetes/integration/node, and its guests run on the libvirt and QEMU of a Debian,
// emulated. `make test-kubevirt` builds what they need (scripts/build-kubevirt.sh) and runs them.
//
// TestKubeVirt brings the cluster up once, and each scenario is a subtest. To add one:
//
//   - make a file NAME_test.go with a method of cluster, and a line for it in TestKubeVirt;
//   - apply objects with c.Apply, from a file of testdata or examples with c.manifest;
//   - c.running waits for a machine, and returns it: run has its guest run a shell command,
//     write and found prove that no write is lost, end ends it and looks how its pod ended.
//
// Machines need names of their own, because scenarios share a namespace and run at the same time.
// One with an older libvirt and QEMU is a scenario of c.older, which has a namespace of its own.
// While you write one, keep the cluster up between runs:
//
//	export KUBEVIRT_DISK_NODES=/tmp/nodes KUBEVIRT_DISK_NIGHTLY=1
//	go test ./integration/kubevirt -run TestKubeVirt/scenarios/throwaway$ -v
package kubevirt
