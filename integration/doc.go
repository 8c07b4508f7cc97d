// Package integration holds the tests of the whole product: they build kubevirt-disk, start it, and
// drive it with the clients that people use (libiscsi's tools, QEMU's). The container image is
// built and run with buildah, podman and runc. It also checks the import rules of the module.
//
// A missing client skips the tests that need it, naming the package that has it; with
// KUBEVIRT_DISK_REQUIRE_TOOLS=1 it fails them. The packages below are shared by the tests and by
// the benchmark program: conformance runs libiscsi's conformance suite, peers starts the targets
// that ours is compared with, bench measures, guest makes a Linux guest for QEMU.
package integration
