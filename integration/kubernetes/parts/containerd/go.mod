// The container runtime of the tests' node. Its versions of other modules are not those of
// Kubernetes, so it has a module of its own. scripts/build-kubernetes.sh builds it.
module kubevirt.io/disk/integration/kubernetes/parts/containerd

go 1.26.6
