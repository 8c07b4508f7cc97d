// Package integration has the tests of the whole product. They build kubevirt-disk, start it, and
// drive it with the clients that people use (libiscsi's tools, QEMU's). They build and run the
// container image with buildah, podman and runc. They also check the import rules of the module.
//
// Tests mostly wait, so they run in parallel. Everything that several of them need is made once
// (see binary, images, bootFiles). Each test has its own ports, directories and network namespaces,
// and waits have limits of minutes.
//
// If a client is missing, the tests that need it skip and name its package; with
// KUBEVIRT_DISK_REQUIRE_TOOLS=1 they fail. The tests and the benchmark program share the packages
// below: conformance runs libiscsi's conformance suite, peers starts the targets that we compare
// ours with, bench measures, and guest makes a Linux guest for QEMU.
package integration
