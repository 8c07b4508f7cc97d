// The CRDs of VolumeSnapshots, for tests. No Go package of it is built.
module kubevirt.io/disk/kubernetes/integration/crds

go 1.26.0

require github.com/kubernetes-csi/external-snapshotter/client/v8 v8.7.0
